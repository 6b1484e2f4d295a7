"""Completions in llama.cpp's own shape, whole or in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from serve_app.api.completion import CompletionRequest
from serve_app.api.native import chosen_fields, native_settings
from serve_app.api.responses import Choice
from serve_app.api.sse import dump
from serve_app.api.sse import event as sse_event
from serve_app.core.delta import FinishReason
from serve_app.core.prompt import Image, Prompt
from serve_app.router.render import Composer, Part
from serve_app.router.run import Event, Run
from serve_app.router.stats import RunStats


class NativeRenderer:
    """Writes one result per event, and a last one per choice with `stop` and what is known of the whole."""

    def __init__(self, request: CompletionRequest, stats: RunStats) -> None:
        self._request = request
        self._composer = Composer(request.model_copy(update={"return_token_ids": True}))  # nosec B105 # no secret
        self._stats = stats
        self._has_new_line: set[int] = set()

    def results(self, event: Event) -> list[dict[str, object]]:
        """What this event adds to its choice."""
        return [self._result(part) for part in self._composer.add(event)]

    def chunks(self, event: Event) -> bytes:
        fields = self._request.response_fields
        return b"".join(
            sse_event(dump(chosen_fields(result, fields) if result["stop"] else result))
            for result in self.results(event)
        )

    def tail(self) -> bytes:
        """Nothing: llama.cpp's own streams end with the last result."""
        return b""

    def _result(self, part: Part[Choice]) -> dict[str, object]:
        choice = part.choice
        if "\n" in choice.text:
            self._has_new_line.add(choice.index)
        result: dict[str, object] = {
            "index": choice.index,
            "content": choice.text,
            "tokens": list(choice.token_ids or ()),
            "id_slot": -1,
            "stop": choice.finish_reason is not None,
            "model": choice.model or self._request.model,
            "tokens_predicted": part.completion_tokens,
            "tokens_evaluated": self._composer.prompt_tokens(part.part),
        }
        if choice.logprobs is not None:
            result["completion_probabilities"] = _probabilities(choice.logprobs.body())
        if self._request.timings_per_token or choice.finish_reason is not None:
            result["timings"] = self._timings(part)
        return result if choice.finish_reason is None else result | self._finish(part)

    def _finish(self, part: Part[Choice]) -> dict[str, object]:
        choice = part.choice
        return {
            "generation_settings": native_settings(self._request),
            "prompt": _shown_prompt(self._request.prompt_of(part.part)),
            "has_new_line": choice.index in self._has_new_line,
            "truncated": part.is_context_end or self._composer.is_prompt_cut(part.part),
            "stop_type": _stop_type(choice),
            "stopping_word": choice.matched_stop if isinstance(choice.matched_stop, str) else "",
            "tokens_cached": self._composer.prompt_tokens(part.part) + part.completion_tokens,
        }

    def _timings(self, part: Part[Choice]) -> dict[str, object]:
        """Of the choice and its prompt, as of what has come of that."""
        return replace(self._stats.of([part.part]).timings, num_predicted_tokens=part.completion_tokens).body()


async def collect_native(run: Run, request: CompletionRequest) -> dict[str, object] | list[dict[str, object]]:
    """Read a run to its end: one result, or a list where there are several choices."""
    renderer = NativeRenderer(request, run.stats)
    results: list[list[dict[str, object]]] = [[] for _ in range(request.num_choices)]
    async for event in run:
        for result in renderer.results(event):
            index = result["index"]
            assert isinstance(index, int)
            results[index].append(result)
    joined = [chosen_fields(_joined(of_choice), request.response_fields) for of_choice in results]
    return joined[0] if len(joined) == 1 else joined


def _joined(results: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """The last result with what all of them added."""
    whole = dict(results[-1])
    whole["content"] = "".join(str(result["content"]) for result in results)
    for name in ("tokens", "completion_probabilities"):
        if any(name in result for result in results):
            whole[name] = [element for result in results for element in _list(result.get(name))]
    return whole


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _stop_type(choice: Choice) -> str:
    if choice.finish_reason is FinishReason.LENGTH:
        return "limit"
    if choice.finish_reason not in (FinishReason.STOP, FinishReason.TOOL_CALLS):
        return "none"
    return "word" if isinstance(choice.matched_stop, str) else "eos"


def _shown_prompt(prompt: Prompt) -> object:
    """The prompt as it was sent: a text, or a list of texts and token ids."""
    if not any(isinstance(part, tuple) for part in prompt.parts):
        return prompt.written
    return [element for part in prompt.parts for element in (part if isinstance(part, tuple) else (_written(part),))]


def _written(part: str | Image) -> str:
    return part if isinstance(part, str) else part.marker


def _probabilities(logprobs: Mapping[str, object]) -> list[dict[str, object]]:
    tokens, chosen, likeliest = (_list(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [
        {
            "token": token,
            "logprob": chosen[at],
            "top_logprobs": [
                {"token": text, "logprob": logprob}
                for text, logprob in ((likeliest[at] if at < len(likeliest) else None) or {}).items()  # type: ignore[attr-defined]
            ],
        }
        for at, token in enumerate(tokens)
    ]
