"""Completions in llama.cpp's own shape, whole or in chunks."""

from __future__ import annotations

from dataclasses import replace

from serve_app.api.completion import CompletionRequest
from serve_app.api.logprobs import LegacyLogprobs
from serve_app.api.native import chosen_fields, native_settings
from serve_app.api.responses import Choice
from serve_app.api.sse import dump
from serve_app.api.sse import event as sse_event
from serve_app.core.delta import FinishReason
from serve_app.core.prompt import Image, Prompt
from serve_app.router.inbox import Event
from serve_app.router.render import Composer, Part, whole_parts
from serve_app.router.run import Run
from serve_app.router.stats import RunStats


class NativeRenderer:
    """Writes one result per event, and a last one per choice with `stop` and what is known of the whole."""

    def __init__(self, request: CompletionRequest, stats: RunStats) -> None:
        self._request = request
        self.composer = Composer(request.model_copy(update={"return_token_ids": True}))  # nosec B105 # no secret
        self._stats = stats
        self._has_new_line: set[int] = set()

    def chunks(self, event: Event) -> bytes:
        results = [self.result(part) for part in self.composer.add(event)]
        fields = self._request.response_fields
        return b"".join(sse_event(dump(chosen_fields(each, fields) if each["stop"] else each)) for each in results)

    def tail(self) -> bytes:
        """Return nothing, as llama.cpp's own streams end with the last result."""
        return b""

    def result(self, part: Part[Choice]) -> dict[str, object]:
        """Return what a part adds to its choice, or the whole choice."""
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
            "tokens_evaluated": self.composer.prompt_tokens(part.part),
        }
        if choice.logprobs:
            result["completion_probabilities"] = _probabilities(choice.logprobs)
        if self._request.timings_per_token or choice.finish_reason is not None:
            result["timings"] = self._timings(part)
        return result if choice.finish_reason is None else result | self._finish(part)

    def _finish(self, part: Part[Choice]) -> dict[str, object]:
        choice = part.choice
        return {
            "generation_settings": native_settings(self._request),
            "prompt": _shown_prompt(self._request.prompt_of(part.part)),
            "has_new_line": choice.index in self._has_new_line,
            "truncated": part.is_context_end or self.composer.is_prompt_cut(part.part),
            "stop_type": _stop_type(choice),
            "stopping_word": choice.matched_stop if isinstance(choice.matched_stop, str) else "",
            "tokens_cached": self.composer.prompt_tokens(part.part) + part.completion_tokens,
        }

    def _timings(self, part: Part[Choice]) -> dict[str, object]:
        """Return the timings of the choice and its prompt so far."""
        return replace(self._stats.of([part.part]).timings, num_predicted_tokens=part.completion_tokens).body()


async def collect_native(run: Run, request: CompletionRequest) -> dict[str, object] | list[dict[str, object]]:
    """Read a run to its end and return one result, or a list if there are several choices."""
    renderer = NativeRenderer(request, run.stats)
    found = {part.choice.index: renderer.result(part) async for part in whole_parts(run, renderer.composer)}
    results = [chosen_fields(found[index], request.response_fields) for index in sorted(found)]
    return results[0] if len(results) == 1 else results


def _stop_type(choice: Choice) -> str:
    if choice.finish_reason is FinishReason.LENGTH:
        return "limit"
    if choice.finish_reason not in (FinishReason.STOP, FinishReason.TOOL_CALLS):
        return "none"
    return "word" if isinstance(choice.matched_stop, str) else "eos"


def _shown_prompt(prompt: Prompt) -> object:
    """Return the prompt as the client sent it: a text, or a list of texts and token ids."""
    if not any(isinstance(part, tuple) for part in prompt.parts):
        return prompt.written
    return [element for part in prompt.parts for element in (part if isinstance(part, tuple) else (_written(part),))]


def _written(part: str | Image) -> str:
    return part if isinstance(part, str) else part.marker


def _probabilities(logprobs: LegacyLogprobs) -> list[dict[str, object]]:
    likeliest = ((top or {}).items() for top in logprobs.top_logprobs)
    return [
        {
            "token": token,
            "logprob": chosen,
            "top_logprobs": [{"token": text, "logprob": logprob} for text, logprob in top],
        }
        for token, chosen, top in zip(logprobs.tokens, logprobs.token_logprobs, likeliest, strict=True)
    ]
