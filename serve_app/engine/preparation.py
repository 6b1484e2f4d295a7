"""Makes sequences of a request: its texts in tokens, within the model's context. Runs in worker threads."""

from __future__ import annotations

from dataclasses import replace

from serve_app.constraints.compiler import Compiled
from serve_app.core.errors import ContextOverflow, InvalidRequest
from serve_app.core.request import GenerationRequest, Prompt, SamplingParams
from serve_app.engine.prompt_bounds import PromptBounds, context_overflow
from serve_app.engine.sequence import Sequence
from serve_app.text.regex_stops import check_regexes
from serve_app.text.tokenizer import TextTokenizer


class Preparation:
    """The facts of one model that decide what a request becomes. Threads may share it.

    max_chars: of texts whose length the vocabulary does not bound; None is a bound by the context
    """

    def __init__(
        self, tokenizer: TextTokenizer, *, model_name: str, max_model_len: int, max_chars: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._bounds = PromptBounds(tokenizer, model_name=model_name, max_model_len=max_model_len, max_chars=max_chars)
        self._model_name = model_name
        self._max_model_len = max_model_len

    @property
    def max_chars(self) -> int:
        """Of a text that is cut into tokens although nothing says that it fits."""
        return self._bounds.max_chars

    def check_length(self, request: GenerationRequest) -> None:
        """Refuse by its length what cannot fit; to be called before `sequences`, on any thread.

        Raises ContextOverflow.
        """
        self._bounds.check_length(request)

    def sequences(self, request: GenerationRequest, compiled: Compiled | None = None) -> list[Sequence]:
        """One for each completion that is wanted, the prompt's tokens in each.

        compiled: the request's constraint, where it has one

        Raises InvalidRequest, ContextOverflow.
        """
        check_regexes(request.stop.patterns)
        try:
            self._bounds.check_heads(request)
            prompt_ids = self._tokenizer.encode(request.prompt)
        except ContextOverflow:
            raise
        except InvalidRequest as error:
            raise type(error)(f"{error} (prompt {request.prompt_index})", error.param, error.facts) from error
        kept = self._kept(request, prompt_ids)
        if len(kept) < len(prompt_ids):
            request = replace(request, prompt=Prompt(parts=(tuple(kept),)))  # an echo shows what is left of it
        request = replace(request, sampling=self._encoded(request))
        max_tokens = self._max_tokens(request, len(kept))
        detokenizers = self._tokenizer.detokenizers(kept, request.n, shows_special=not request.skips_special_tokens)
        return [
            Sequence(
                request,
                kept,
                sample=sample,
                max_tokens=max_tokens,
                num_dropped_tokens=len(prompt_ids) - len(kept),
                detokenizer=detokenizer,
                matcher=None if compiled is None else compiled.matcher(),
            )
            for sample, detokenizer in enumerate(detokenizers)
        ]

    def _kept(self, request: GenerationRequest, prompt_ids: list[int]) -> list[int]:
        """What is left of the prompt: as many tokens as are wanted at most, without its beginning where that was asked
        for and it leaves no room.

        As mistral.rs does, the last `context - min(max_tokens or 1, context)` tokens stay. Where the completion may be
        shortened, at least half of the context stays the prompt's; otherwise at least one token.
        """
        prompt_ids = self._bounded(request, prompt_ids)
        context, wanted = self._max_model_len, request.stop.max_tokens
        if not request.context.truncates_prompt or not self._leaves_no_room(request, len(prompt_ids)):
            return prompt_ids
        least = context // 2 if request.context.shortens_completion else 1
        num_kept = max(1, least, context - min(wanted or 1, context))
        return prompt_ids[-num_kept:]

    def _bounded(self, request: GenerationRequest, prompt_ids: list[int]) -> list[int]:
        """One end of the prompt, where only so many of its tokens are wanted."""
        most, wanted = request.context.max_prompt_tokens, request.stop.max_tokens
        if most is None:
            return prompt_ids
        most = most or max(1, self._max_model_len - (1 if wanted is None else wanted))
        return prompt_ids[:most] if request.context.keeps_beginning else prompt_ids[-most:]

    def _leaves_no_room(self, request: GenerationRequest, num_prompt_tokens: int) -> bool:
        room = self._max_model_len - num_prompt_tokens
        return room < 0 or (room == 0 and request.stop.max_tokens != 0)

    def _max_tokens(self, request: GenerationRequest, num_prompt_tokens: int) -> int:
        """How many tokens may be generated, the context's end considered."""
        context, wanted = self._max_model_len, request.stop.max_tokens
        facts = {"n_prompt_tokens": num_prompt_tokens, "n_ctx": context}
        if self._leaves_no_room(request, num_prompt_tokens):
            found = f"has {num_prompt_tokens} tokens"
            raise context_overflow(request, found, model_name=self._model_name, max_model_len=context, facts=facts)
        room = context - num_prompt_tokens
        if wanted is not None and wanted > room and not request.context.shortens_completion:
            beside = f"prompt {request.prompt_index}, which has {num_prompt_tokens} of the {context} tokens"
            raise ContextOverflow.refusing(
                request.context.max_tokens_name,
                must=f"be at most {room} beside {beside} of {self._model_name}'s context",
                found=str(wanted),
                remedy='Lower it, or send "context_length_exceeded_behavior": "truncate".',
                facts=facts,
            )
        return room if wanted is None else min(wanted, room)

    def _encoded(self, request: GenerationRequest) -> SamplingParams:
        """The sampling parameters with those that came as text."""
        sampling, texts = request.sampling, request.unencoded
        encoded = self._tokenizer.encode_texts([text for text, _ in texts.logit_bias])
        biased = tuple(
            (token_id, bias)
            for token_ids, (_, bias) in zip(encoded, texts.logit_bias, strict=True)
            for token_id in token_ids
        )
        dry = sampling.dry
        if dry is not None:
            ways = self._tokenizer.encode_behind(texts.dry_breakers)
            dry = replace(dry, breakers=(*dry.breakers, *dict.fromkeys(ways)))
        words = self._tokenizer.encode_behind([way for word in texts.bad_words for way in (word, " " + word.lstrip())])
        bad_words = (*sampling.bad_words, *dict.fromkeys(words))
        return replace(sampling, logit_bias=(*sampling.logit_bias, *biased), bad_words=bad_words, dry=dry)
