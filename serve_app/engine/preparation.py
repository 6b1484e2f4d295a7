"""Makes sequences of a request: its texts in tokens, within the model's context. Runs in worker threads."""

from __future__ import annotations

from dataclasses import replace

from serve_app.core.errors import ContextOverflow, InvalidRequest
from serve_app.core.request import GenerationRequest, Prompt, SamplingParams
from serve_app.engine.sequence import Sequence
from serve_app.text.regex_stops import check_regexes
from serve_app.text.tokenizer import TextTokenizer


class Preparation:
    """The facts of one model that decide what a request becomes. Threads may share it."""

    def __init__(self, tokenizer: TextTokenizer, *, model_name: str, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._max_model_len = max_model_len

    def sequences(self, request: GenerationRequest) -> list[Sequence]:
        """One for each completion that is wanted, the prompt's tokens in each.

        Raises InvalidRequest, ContextOverflow.
        """
        check_regexes(request.stop.patterns)
        try:
            prompt_ids = self._tokenizer.encode(request.prompt)
        except InvalidRequest as error:
            raise type(error)(f"{error} (prompt {request.prompt_index})", error.param, error.facts) from error
        kept = self._kept(request, prompt_ids)
        if len(kept) < len(prompt_ids):
            request = replace(request, prompt=Prompt(parts=(tuple(kept),)))  # an echo shows what is left of it
        request = replace(request, sampling=self._encoded(request))
        max_tokens = self._max_tokens(request, len(kept))
        return [
            Sequence(
                request,
                kept,
                sample=sample,
                max_tokens=max_tokens,
                num_dropped_tokens=len(prompt_ids) - len(kept),
                detokenizer=self._tokenizer.detokenizer(kept, shows_special=not request.skips_special_tokens),
            )
            for sample in range(request.n)
        ]

    def _kept(self, request: GenerationRequest, prompt_ids: list[int]) -> list[int]:
        """The prompt, without its beginning where that was asked for and it leaves no room.

        As mistral.rs does, the last `context - min(max_tokens or 1, context)` tokens stay. Where the completion may be
        shortened, at least half of the context stays the prompt's; otherwise at least one token.
        """
        context, wanted = self._max_model_len, request.stop.max_tokens
        if not request.context.truncates_prompt or not self._leaves_no_room(request, len(prompt_ids)):
            return prompt_ids
        least = context // 2 if request.context.shortens_completion else 1
        num_kept = max(1, least, context - min(wanted or 1, context))
        return prompt_ids[-num_kept:]

    def _leaves_no_room(self, request: GenerationRequest, num_prompt_tokens: int) -> bool:
        room = self._max_model_len - num_prompt_tokens
        return room < 0 or (room == 0 and request.stop.max_tokens != 0)

    def _max_tokens(self, request: GenerationRequest, num_prompt_tokens: int) -> int:
        """How many tokens may be generated, the context's end considered."""
        context, wanted = self._max_model_len, request.stop.max_tokens
        facts = {"n_prompt_tokens": num_prompt_tokens, "n_ctx": context}
        if self._leaves_no_room(request, num_prompt_tokens):
            raise ContextOverflow(
                f"`prompt` {request.prompt_index} has {num_prompt_tokens} tokens, which exceeds the available context"
                f" size: that of {self._model_name} is {context} tokens, prompt and completion together. Shorten it,"
                " or send `truncate_sequence`: true.",
                "prompt",
                facts,
            )
        room = context - num_prompt_tokens
        if wanted is not None and wanted > room and not request.context.shortens_completion:
            name = request.context.max_tokens_name
            raise ContextOverflow(
                f"`{name}` must be at most {room} with `prompt` {request.prompt_index}, which has"
                f" {num_prompt_tokens} of the {context} tokens of {self._model_name}'s context; found {wanted}. Lower"
                ' it, or send `context_length_exceeded_behavior`: "truncate".',
                name,
                facts,
            )
        return room if wanted is None else min(wanted, room)

    def _encoded(self, request: GenerationRequest) -> SamplingParams:
        """The sampling parameters with those that came as text."""
        sampling, texts = request.sampling, request.unencoded
        biased = tuple(
            (token_id, bias) for text, bias in texts.logit_bias for token_id in self._tokenizer.encode_text(text)
        )
        dry = sampling.dry
        if dry is not None:
            ways = [way for text in texts.dry_breakers for way in self._tokenizer.encode_behind(text)]
            dry = replace(dry, breakers=(*dry.breakers, *dict.fromkeys(ways)))
        return replace(sampling, logit_bias=(*sampling.logit_bias, *biased), dry=dry)
