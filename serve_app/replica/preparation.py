"""Makes sequences of a request: its texts in tokens, within the model's context. Runs in worker threads."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from serve_app.constraints.compiler import Compiled
from serve_app.core.context import leaves_no_room
from serve_app.core.errors import ContextOverflow, InvalidRequest
from serve_app.core.infill import Infill
from serve_app.core.prompt_length import PromptLength
from serve_app.core.request import GenerationRequest, Prompt, SamplingParams
from serve_app.engine.decoder.record import Record, RecordBounds
from serve_app.engine.scheduler.sequence import Sequence
from serve_app.engine.vision.eyes import Eyes
from serve_app.engine.vision.illustration import Illustration
from serve_app.engine.vision.seen import Seen
from serve_app.replica.prompt_bounds import check_heads
from serve_app.replica.prompt_images import illustrated, spelled, without_files
from serve_app.text.infill import arrange
from serve_app.text.regex_stops import check_regexes
from serve_app.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrompt:
    """A prompt in tokens, as far as it fits.

    request: with the prompt and the end tokens that follow from that
    shown:   where the prompt that is echoed stands among the tokens
    illustration: its images
    """

    request: GenerationRequest
    token_ids: list[int]
    shown: range
    num_dropped: int = 0
    illustration: Illustration | None = None


class Preparation:
    """The facts of one model that decide what a request becomes. Threads may share it.

    max_chars: of texts whose length the vocabulary does not bound; None is a bound by the context
    eyes:      of a model that sees
    length:    what bounds a prompt before it is cut into tokens
    records:   what may be kept of a computation; None keeps nothing
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        model_name: str,
        max_model_len: int,
        max_chars: int | None = None,
        eyes: Eyes | None = None,
        records: RecordBounds | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._records = records
        self.length = PromptLength.of(
            model_name,
            max_model_len=max_model_len,
            chars_per_token=tokenizer.chars_per_token,
            max_chars=max_chars,
        )
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._eyes = eyes

    @property
    def max_chars(self) -> int:
        """Of a text that is cut into tokens although nothing says that it fits."""
        return self.length.max_chars

    def check_length(self, request: GenerationRequest) -> None:
        """Refuse by its length what cannot fit; to be called before `sequences`, on any thread.

        Raises ContextOverflow.
        """
        self.length.check(request)

    def sequences(
        self, request: GenerationRequest, compiled: Compiled | None = None, seen: Items[Seen] = ()
    ) -> list[Sequence]:
        """One for each completion that is wanted, the prompt's tokens in each.

        compiled: the request's constraint, where it has one;  seen: the images of its prompt

        Raises InvalidRequest, ContextOverflow.
        """
        check_regexes(request.stop.patterns)
        try:
            check_heads(request, self._tokenizer, self.length)
            read = self._read(request, seen)
        except ContextOverflow:
            raise
        except InvalidRequest as error:
            param = request.context.prompt_name if error.param == "prompt" else error.param
            raise type(error)(f"{error} (prompt {request.prompt_index})", param, error.facts) from error
        kept = read.token_ids
        request = replace(read.request, sampling=self._encoded(request))
        max_tokens = self._max_tokens(request, len(kept))
        records = self._empty_records(request, len(kept), max_tokens)
        prediction = self._prediction(request)
        detokenizers = self._tokenizer.detokenizers(
            kept, request.n, shows_special=not request.skips_special_tokens, shown_marks=request.shown_marks
        )
        return [
            Sequence(
                request,
                kept,
                sample=sample,
                max_tokens=max_tokens,
                num_dropped_tokens=read.num_dropped,
                shown_prompt=read.shown,
                detokenizer=detokenizer,
                matcher=None if compiled is None else compiled.matcher(),
                illustration=read.illustration,
                record=records[sample],
                prediction=prediction,
            )
            for sample, detokenizer in enumerate(detokenizers)
        ]

    def _empty_records(self, request: GenerationRequest, num_tokens: int, max_tokens: int) -> list[Record | None]:
        if request.record is None or self._records is None:
            return [None] * request.n
        return self._records.records(request, num_tokens, max_tokens=max_tokens)

    def _prediction(self, request: GenerationRequest) -> tuple[int, ...]:
        """What the completion is expected to be in tokens, as many as the context has."""
        sent = request.prediction
        if not sent:
            return ()
        token_ids = self._tokenizer.encode_inside(sent[: self.max_chars]) if isinstance(sent, str) else sent
        return token_ids[: self._max_model_len]

    def _read(self, request: GenerationRequest, seen: Items[Seen]) -> ReadPrompt:
        """The prompt in tokens, of what fits. Raises InvalidRequest."""
        if request.infill is not None:
            return self._read_gap(request, request.infill)
        prompt, form = request.prompt, None if request.record is None else request.record.embedding
        if form is not None and form.lowers_case:
            prompt = replace(
                prompt, parts=tuple(part.lower() if isinstance(part, str) else part for part in prompt.parts)
            )
        prompt_ids = self._tokenizer.encode(spelled(prompt, seen, self._eyes))
        if form is not None and prompt.text is not None:
            prompt_ids += self._tokenizer.suffix_ids
        illustration = illustrated(prompt_ids, seen, self._eyes)
        request = without_files(request)
        bounded = self._bounded(request, prompt_ids, has_images=bool(seen))
        num_kept = len(bounded) if seen else self._num_kept(request, len(bounded))
        if num_kept == len(prompt_ids):
            return ReadPrompt(request=request, token_ids=prompt_ids, shown=range(num_kept), illustration=illustration)
        kept = bounded[-num_kept:]
        cut = replace(request, prompt=Prompt(parts=(tuple(kept),)))  # an echo shows what is left of it
        return ReadPrompt(request=cut, token_ids=kept, shown=range(num_kept), num_dropped=len(prompt_ids) - len(kept))

    def _read_gap(self, request: GenerationRequest, infill: Infill) -> ReadPrompt:
        if request.prompt.images:
            raise InvalidRequest.refusing("suffix_mode", must='be "append" beside images', found='"fim"')
        whole = arrange(self._tokenizer, request.prompt, infill)
        num_tokens = len(whole.token_ids)
        gap = whole.fitted(min(self._num_kept(request, num_tokens), self._num_wanted(request, num_tokens)))
        token_ids, stop = gap.token_ids, request.stop
        if not stop.ignore_eos:
            stop = replace(stop, token_ids=(*stop.token_ids, *gap.markers.ends))
        prompt = request.prompt
        if prompt.text is None or gap.prefix != whole.prefix:
            prompt = Prompt(parts=(gap.prefix,))
        return ReadPrompt(
            request=replace(request, prompt=prompt, stop=stop),
            token_ids=token_ids,
            shown=gap.shown,
            num_dropped=num_tokens - len(token_ids),
        )

    def _context(self, request: GenerationRequest) -> int:
        """Tokens of a prompt and its completion; of an input that is embedded, no more than the model was made for."""
        form = None if request.record is None else request.record.embedding
        longest = None if form is None else form.max_tokens
        return self._max_model_len if longest is None else min(longest, self._max_model_len)

    def _num_kept(self, request: GenerationRequest, num_prompt_tokens: int) -> int:
        wanted = request.stop.max_tokens
        return request.context.num_kept(num_prompt_tokens, max_tokens=wanted, max_model_len=self._context(request))

    def _num_wanted(self, request: GenerationRequest, num_prompt_tokens: int) -> int:
        wanted = request.stop.max_tokens
        return request.context.num_wanted(num_prompt_tokens, max_tokens=wanted, max_model_len=self._max_model_len)

    def _bounded(self, request: GenerationRequest, prompt_ids: list[int], *, has_images: bool) -> list[int]:
        """One end of the prompt, where only so many of its tokens are wanted."""
        most = self._num_wanted(request, len(prompt_ids))
        if most == len(prompt_ids):
            return prompt_ids
        if has_images:
            must = f"be at least {len(prompt_ids)} beside images, which cannot be cut"
            raise InvalidRequest.refusing("truncate_prompt_tokens", must=must, found=str(most))
        return prompt_ids[:most] if request.context.keeps_beginning else prompt_ids[-most:]

    def _max_tokens(self, request: GenerationRequest, num_prompt_tokens: int) -> int:
        """How many tokens may be generated, the context's end considered."""
        context, wanted = self._context(request), request.stop.max_tokens
        facts = {"n_prompt_tokens": num_prompt_tokens, "n_ctx": context}
        if leaves_no_room(num_prompt_tokens, wanted, max_model_len=context):
            found = f"has {num_prompt_tokens} tokens"
            length = replace(self.length, max_model_len=context)
            raise length.overflow(request, found, {"n_prompt_tokens": num_prompt_tokens})
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
