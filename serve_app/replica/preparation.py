"""Prepares a request for the engine: its texts in tokens, within the model's context. Runs in worker threads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from serve_app.constraints.compiler import Compiled
from serve_app.core.cards import PromptLength
from serve_app.core.errors import ContextOverflow, InvalidRequest
from serve_app.core.prompt import Conversation, Image, Infill, Prompt, Rendering
from serve_app.core.request import EmbeddingForm, GenerationRequest, HeadForm, SamplingParams, leaves_no_room
from serve_app.replica.engine import EncodedImage, ImageMarks, PreparedRequest
from serve_app.text.infill import arrange
from serve_app.text.regex_stops import check_regexes
from serve_app.text.tokenizer import TextTokenizer

# Of a text longer than this many characters per token of the context, the beginning is counted first. What stands
# behind a place in a text changes the tokens before it only nearby; half of them is more than it ever takes back.
HEAD_CHARS_PER_TOKEN = 16
HEAD_MARGIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrompt:
    """The part of a prompt that fits, in tokens.

    request: with the prompt and the end tokens that follow from that
    shown:   where the prompt that is echoed stands among the tokens
    """

    request: GenerationRequest
    token_ids: list[int]
    shown: range
    num_dropped: int = 0


class Preparation:
    """Turns requests to one model into tokens. Threads may share it.

    max_chars: of texts whose length the vocabulary does not bound; None is a bound by the context
    marks:     how prompts name images; None for a model of text
    length:    bounds a prompt before it is cut into tokens; let it check each request before `prepare`
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        model_name: str,
        max_model_len: int,
        max_chars: int | None = None,
        marks: ImageMarks | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.length = PromptLength.of(
            model_name,
            max_model_len=max_model_len,
            chars_per_token=tokenizer.chars_per_token,
            max_chars=max_chars,
        )
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._marks = marks

    def prepare(
        self, request: GenerationRequest, compiled: Compiled | None = None, images: Items[EncodedImage] = ()
    ) -> PreparedRequest:
        """Cut the texts of a request into tokens.

        compiled: the request's constraint, where it has one;  images: of its prompt, encoded

        Raises InvalidRequest, ContextOverflow.
        """
        check_regexes(request.stop.patterns)
        try:
            check_heads(request, self._tokenizer, self.length)
            read = self._read(request, images)
        except ContextOverflow:
            raise
        except InvalidRequest as error:
            param = request.context.prompt_name if error.param == "prompt" else error.param
            raise type(error)(f"{error} (prompt {request.prompt_index})", param, error.facts) from error
        kept = read.token_ids
        request = replace(read.request, sampling=self._encoded(request))
        return PreparedRequest(
            request=request,
            token_ids=kept,
            max_tokens=self._max_tokens(request, len(kept)),
            num_dropped_tokens=read.num_dropped,
            shown_prompt=read.shown,
            detokenizers=self._tokenizer.detokenizers(
                kept, request.n, shows_special=not request.skips_special_tokens, shown_marks=request.shown_marks
            ),
            matchers=() if compiled is None else [compiled.matcher() for _ in range(request.n)],
            images=tuple(images),
            prediction=self._prediction(request),
        )

    def _prediction(self, request: GenerationRequest) -> tuple[int, ...]:
        """Return the expected completion in tokens, at most a context's length."""
        sent = request.prediction
        if not sent:
            return ()
        token_ids = self._tokenizer.encode_inside(sent[: self.length.max_chars]) if isinstance(sent, str) else sent
        return token_ids[: self._max_model_len]

    def _read(self, request: GenerationRequest, images: Items[EncodedImage]) -> ReadPrompt:
        """Tokenize the prompt and keep what fits. Raises InvalidRequest."""
        if request.infill is not None:
            return self._read_gap(request, request.infill)
        form = None if request.record is None else request.record.embedding
        if form is not None:
            prompt_ids = self._input_ids(request.prompt, form)
        else:
            prompt_ids = self._tokenizer.encode(spelled(request.prompt, images, self._marks))
        check_image_places(prompt_ids, images, self._marks)
        request = without_files(request)
        bounded = self._bounded(request, prompt_ids, has_images=bool(images))
        num_kept = len(bounded) if images else self._num_kept(request, len(bounded))
        if num_kept == len(prompt_ids):
            return ReadPrompt(request=request, token_ids=prompt_ids, shown=range(num_kept))
        kept = bounded[-num_kept:]
        cut = replace(request, prompt=Prompt(parts=(tuple(kept),)))  # an echo shows what is left of it
        return ReadPrompt(request=cut, token_ids=kept, shown=range(num_kept), num_dropped=len(prompt_ids) - len(kept))

    def _input_ids(self, prompt: Prompt, form: EmbeddingForm) -> list[int]:
        """Tokenize an input: token ids, a text, or the two texts of a pair. Texts are closed as the tokenizer does.

        Raises InvalidRequest.
        """
        parts = tuple(part.lower() if isinstance(part, str) and form.lowers_case else part for part in prompt.parts)
        match parts:
            case str() as first, str() as second:
                token_ids = self._tokenizer.encode_pair(first, second)
            case _:
                token_ids = self._tokenizer.encode(replace(prompt, parts=parts))
                token_ids += self._tokenizer.suffix_ids if prompt.text is not None else ()
        if isinstance(form, HeadForm):
            while len(token_ids) > 1 and token_ids[-1] == form.pad_token_id:
                del token_ids[-1]
        return token_ids

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
        """Return the context of a request; an input to embed may have a shorter one."""
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
        """Cut the prompt at the end that the client chose, if it asked for so many tokens."""
        most = self._num_wanted(request, len(prompt_ids))
        if most == len(prompt_ids):
            return prompt_ids
        if has_images:
            must = f"be at least {len(prompt_ids)} beside images, which cannot be cut"
            raise InvalidRequest.refusing("truncate_prompt_tokens", must=must, found=str(most))
        return prompt_ids[:most] if request.context.keeps_beginning else prompt_ids[-most:]

    def _max_tokens(self, request: GenerationRequest, num_prompt_tokens: int) -> int:
        """Return how many tokens may be generated within the context. Raises ContextOverflow."""
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
        """Return the sampling parameters with those sent as text in token ids."""
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


def check_heads(request: GenerationRequest, tokenizer: TextTokenizer, length: PromptLength) -> None:
    """Tokenize the beginning of each long text, and raise ContextOverflow if it alone is too long."""
    if request.context.takes_any_length:
        return
    num_head = HEAD_CHARS_PER_TOKEN * length.max_model_len
    for text in request.texts:
        if len(text) > num_head:
            num_tokens = tokenizer.count(text[:num_head])
            if num_tokens > HEAD_MARGIN * length.max_model_len:
                found = f"has {len(text)} characters, of which {num_head} alone are {num_tokens} tokens"
                raise length.overflow(request, found, {"n_prompt_chars": len(text)})


def spelled(prompt: Prompt, images: Items[EncodedImage], marks: ImageMarks | None) -> Prompt:
    """Replace each image of a prompt by the model's text for it, joined with the texts beside it."""
    if not images or marks is None:
        return prompt
    texts = [_text(image, each, marks) for image, each in zip(prompt.images, images, strict=True)]
    parts = tuple(_joined(prompt, iter(texts)))
    return replace(prompt, parts=parts, foreign=tuple(_moved(prompt, texts)))


def placed(conversation: Conversation, rendering: Rendering, marks: ImageMarks | None) -> Prompt:
    """Put the images of a rendered conversation where the template wrote the model's marker.

    Markers that a client wrote are text. Raises InvalidRequest if there are not as many markers as images.
    """
    text, images = rendering.text, conversation.images
    prompt = Prompt(parts=(text,), adds_special=False, foreign=rendering.foreign)
    if not images or marks is None:
        return prompt
    starts = [place for place in _starts(text, marks.marker) if not _is_foreign(rendering, place, len(marks.marker))]
    if len(starts) != len(images):
        must = f"hold as many images as the model's chat template writes places for, which are {len(starts)}"
        raise InvalidRequest.refusing(conversation.name, must=must, found=str(len(images)))
    parts: list[str | Image] = []
    done = 0
    for start, image in zip(starts, images, strict=True):
        parts += [text[done:start], replace(image, marker=marks.marker)]
        done = start + len(marks.marker)
    return replace(prompt, parts=tuple(part for part in (*parts, text[done:]) if part != ""))


def check_image_places(token_ids: Items[int], images: Items[EncodedImage], marks: ImageMarks | None) -> None:
    """Raise InvalidRequest if the prompt itself has the image token."""
    if marks is None or token_ids.count(marks.token_id) == sum(image.num_rows for image in images):
        return
    raise InvalidRequest.refusing(
        "prompt",
        must=f"have an image for every {marks.marker}, which this model has for images",
        found=f"{len(images)} images and more places" if images else "a place and no image",
    )


def without_files(request: GenerationRequest) -> GenerationRequest:
    """Drop the bytes of a request's images once they are encoded."""
    prompt = request.prompt
    if not prompt.images:
        return request
    if any(isinstance(part, tuple) for part in prompt.parts):
        parts = tuple(replace(part, data=b"") if isinstance(part, Image) else part for part in prompt.parts)
        return replace(request, prompt=Prompt(parts=parts))
    written = Prompt(parts=(prompt.written,), adds_special=prompt.adds_special)
    return replace(request, prompt=written)  # as an echo shows it


def _text(image: Image, encoded: EncodedImage, marks: ImageMarks) -> str:
    """Return the text of an image, with the texts around it unless the client wrote the model's own marker."""
    before, behind = ("", "") if image.marker == marks.marker else marks.around
    return before + encoded.text + behind


def _joined(prompt: Prompt, texts: Iterator[str]) -> Iterator[str | tuple[int, ...]]:
    """Join the parts around each image; the others are tokenized each by itself."""
    text, is_open = "", False
    for part in prompt.parts:
        match part:
            case Image():
                text, is_open = text + next(texts), True
            case str() if is_open or not text:
                text, is_open = text + part, False
            case _:
                if text:
                    yield text
                text, is_open = (part, False) if isinstance(part, str) else ("", False)
                if not isinstance(part, str):
                    yield part
    if text:
        yield text


def _moved(prompt: Prompt, texts: Items[str]) -> Iterator[int]:
    """Return where foreign characters stand once each marker is replaced by its text."""
    places: list[tuple[int, int]] = []  # the place of a marker, and what its text adds
    num_chars, waiting = 0, iter(texts)
    for part in prompt.parts:
        if isinstance(part, Image):
            places.append((num_chars, len(next(waiting)) - len(part.marker)))
        num_chars += len(part.marker) if isinstance(part, Image) else len(part)
    for place in prompt.foreign:
        yield place + sum(added for start, added in places if start < place)


def _starts(text: str, marker: str) -> Iterator[int]:
    place = text.find(marker)
    while place >= 0:
        yield place
        place = text.find(marker, place + len(marker))


def _is_foreign(rendering: Rendering, start: int, length: int) -> bool:
    at = bisect_left(rendering.foreign, start)
    return at < len(rendering.foreign) and rendering.foreign[at] < start + length
