"""Reads a model's tokenizer and turns prompts into token ids and token ids into text."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Encoding, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from serve_app.core.cards import TokenizerCard
from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import Image, Prompt, Tokenization, TokenizeRequest
from serve_app.text.detokenizer import Detokenizer, Pieces, UnsupportedTokenizer, join
from serve_app.text.fast_tokenizer import chars_per_token, find_markers, read_fast

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the library's own threads, whose priority nobody chooses


class TextTokenizer:
    """A tokenizer with the vocabulary of its model. Threads may share it: after it was made it only caches.

    While texts are cut into tokens other threads run, and this one alone does it, however many texts there are.

    vocab_size:  of the model; may be larger than the tokenizer's (padding) or smaller
    card:        how it calls itself and its special tokens
    special_ids: tokens that have a meaning but no text
    chars_per_token: the most characters of a text that end up in one token; None where nothing bounds them
    prefix_ids, suffix_ids: tokens that it puts before a text, and behind one
    markers:     with which its model fills gaps; None where it has none
    notes:       what its files say that changes nothing here
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, card: TokenizerCard | None = None, notes: tuple[str, ...] = ()
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._pieces = Pieces(tokenizer)
        self.prefix_ids, self.suffix_ids = _outer_ids(tokenizer)
        self._token_texts: dict[int, str] = {}
        self.vocab_size = vocab_size
        self.card, self.notes = card or TokenizerCard(), notes
        self.special_ids = self._pieces.special_ids
        self.chars_per_token = chars_per_token(tokenizer)
        self.markers = find_markers(tokenizer, dict(self.card.special_tokens), vocab_size=vocab_size)

    @classmethod
    def load(cls, path: Path, *, vocab_size: int) -> TextTokenizer:
        """Read the tokenizer of a model folder; nothing is fetched and no code of the folder is run.

        Raises UnsupportedTokenizer where the library cannot make a fast one of the folder's files, or its decoder
        needs the whole text.
        """
        loaded, notes = read_fast(path)
        try:
            return cls(loaded.backend_tokenizer, vocab_size=vocab_size, card=_card(loaded), notes=notes)
        except UnsupportedTokenizer as error:
            raise UnsupportedTokenizer(f"the tokenizer in {path} cannot stream: {error}") from error

    def encode(self, prompt: Prompt) -> list[int]:
        """Give the prompt's token ids, with the tokenizer's leading special tokens where text comes first.

        Special tokens written out in a text are parsed as such. Raises InvalidRequest where nothing comes out
        or an id is not of the model's vocabulary.
        """
        token_ids: list[int] = []
        if prompt.adds_special and prompt.parts and isinstance(prompt.parts[0], str):
            token_ids += self.prefix_ids
        num_prefixed = len(token_ids)
        for part in prompt.parts:
            assert not isinstance(part, Image), "what a model writes for an image is a text before this"
            if isinstance(part, str):
                token_ids += self._encode_rendered(part, prompt.foreign) if prompt.foreign else self.encode_text(part)
            else:
                token_ids += part
        if len(token_ids) == num_prefixed:
            raise InvalidRequest.refusing("prompt", must="not be empty", found="no token that the model knows")
        self._check_range(token_ids)
        return token_ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Give the tokens of two texts as the tokenizer joins a pair, with all that it puts around and between them.

        Raises InvalidRequest as `encode` does.
        """
        for text in (first, second):
            _check_unicode(text)
        token_ids: list[int] = self._tokenizer.encode_batch_fast([(first, second)], add_special_tokens=True)[0].ids
        if not token_ids:
            raise InvalidRequest.refusing("prompt", must="not be empty", found="no token that the model knows")
        self._check_range(token_ids)
        return token_ids

    def count(self, text: str) -> int:
        """Say how many tokens a text is cut into, without any that a tokenizer puts in front."""
        _check_unicode(text)
        return len(_encodings(self._tokenizer, [text])[0])

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Give the tokens of a text inside another, without any that a tokenizer puts in front."""
        return self.encode_texts([text])[0]

    def encode_texts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Give the tokens of several texts, each as `encode_text` does."""
        for text in texts:
            _check_unicode(text)
        return [tuple(encoding.ids) for encoding in _encodings(self._tokenizer, texts)]

    def encode_behind(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Give each way in which one of the texts is written in tokens: alone, and behind a letter."""
        letter, *found = self.encode_texts(["a", *texts, *("a" + text for text in texts)])
        ways = []
        for alone, anchored in zip(found[: len(texts)], found[len(texts) :], strict=True):
            ways.append(alone)
            if anchored[: len(letter)] == letter:
                ways.append(anchored[len(letter) :])
        return [way for way in dict.fromkeys(ways) if way]

    def encode_literal(self, text: str) -> tuple[int, ...]:
        """Give the tokens of a text inside another, in which names of special tokens are text like any other."""
        return tuple(_encodings(self._literal_tokenizer, [text])[0].ids)

    def encode_inside(self, text: str) -> tuple[int, ...]:
        """Give the tokens as `encode_literal`, without the space that some tokenizers add before any text."""
        if not self._adds_space:
            return self.encode_literal(text)
        return self.encode_literal("\n" + text)[len(self.encode_literal("\n")) :]

    def encode_parts(self, prompt: Prompt) -> tuple[int, ...]:
        """Give the tokens of a prompt without any in front, its texts as `encode_literal` has them.

        Raises InvalidRequest for an id outside the vocabulary.
        """
        token_ids: tuple[int, ...] = ()
        for part in prompt.parts:
            assert not isinstance(part, Image), "nobody fills a gap beside images"
            token_ids += self.encode_literal(part) if isinstance(part, str) else part
        if token_ids:
            self._check_range(token_ids)
        return token_ids

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokenizer's own end of text, where it has one."""
        found = self._tokenizer.token_to_id(dict(self.card.special_tokens).get("eos_token", ""))
        return frozenset() if found is None or found >= self.vocab_size else frozenset([found])

    @property
    def pieces(self) -> tuple[bytes | None, ...]:
        """[vocab_size] the bytes that each token adds behind other text; None for special tokens and padding."""
        return tuple(self._pieces.middle(token_id) for token_id in range(self.vocab_size))

    @property
    def special_names(self) -> tuple[tuple[str, int], ...]:
        """Special tokens with their ids."""
        named = ((self._pieces.name(token_id), token_id) for token_id in sorted(self.special_ids))
        return tuple((name, token_id) for name, token_id in named if name is not None and token_id < self.vocab_size)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Give the text of tokens; special tokens and ids that mean nothing are left out."""
        return join(self._pieces, token_ids)

    def tokenize(self, request: TokenizeRequest, foreign: Sequence[int] = ()) -> Tokenization:
        """Cut a text into tokens; the empty text has none but those put in front.

        foreign: where in a rendered text no special token may reach
        """
        if foreign:
            found = self._encode_rendered(request.text, foreign)
        else:
            tokenizer = self._tokenizer if request.parses_special else self._literal_tokenizer
            found = tuple(_encodings(tokenizer, [request.text])[0].ids)
        token_ids = (*(self.prefix_ids if request.adds_special else ()), *found)
        pieces = tuple(map(self._bytes_of, token_ids)) if request.with_pieces else None
        return Tokenization(token_ids=token_ids, pieces=pieces)

    def untokenize(self, token_ids: Iterable[int]) -> str:
        """Give the text of tokens, special ones by their names; ids that mean nothing are left out."""
        pieces: list[bytes] = []
        is_at_start = True
        for token_id in token_ids:
            is_visible = self._pieces.middle(token_id) is not None
            pieces.append(self._pieces.first(token_id) if is_visible and is_at_start else self._bytes_of(token_id))
            is_at_start = is_at_start and not is_visible
        return b"".join(pieces).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """Show one token by itself, as in `logprobs.tokens`.

        A leading space is kept, a special token is shown by its name, bytes that are no whole characters as
        `bytes:\\xe2\\x80`, an id that means nothing as `<id:123>`.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._show(token_id)
        return text

    def detokenizer(self, prompt_ids: Sequence[int], *, shows_special: bool = False) -> Detokenizer:
        """Begin the text that follows a prompt."""
        return self.detokenizers(prompt_ids, 1, shows_special=shows_special)[0]

    def detokenizers(
        self, prompt_ids: Sequence[int], count: int, *, shows_special: bool = False, shown_marks: tuple[str, ...] = ()
    ) -> list[Detokenizer]:
        """Begin so many texts that follow one prompt, which is looked through once."""
        has_visible = any(self._pieces.middle(token_id) is not None for token_id in reversed(prompt_ids))
        return [
            Detokenizer(self._pieces, is_at_start=not has_visible, shows_special=shows_special, shown_marks=shown_marks)
            for _ in range(count)
        ]

    @cached_property
    def _literal_tokenizer(self) -> Tokenizer:
        """One that takes special tokens written out in a text for text."""
        tokenizer = sharing_model(self._tokenizer) or Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def _adds_space(self) -> bool:
        """Whether a text is cut as if a space stood before it."""
        first, *_ = self.encode_literal("\n")
        return self._pieces.middle(first) == b" "

    def _encode_rendered(self, text: str, foreign: Sequence[int]) -> tuple[int, ...]:
        """Give the tokens of a text in which no special token may reach over a foreign character."""
        _check_unicode(text)
        return encode_rendered(
            text,
            foreign,
            encode=lambda texts: self._tokenizer.encode_batch(texts, add_special_tokens=False),
            encode_literally=lambda texts: _encodings(self._literal_tokenizer, texts),
            special_ids=self.special_ids - _unknown_ids(self._tokenizer),
        )

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self._pieces.middle(token_id)
        return piece if piece is not None else (self._pieces.name(token_id) or "").encode()

    def _check_range(self, token_ids: Sequence[int]) -> None:
        if min(token_ids) >= 0 and max(token_ids) < self.vocab_size:
            return
        stray = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
        must = f"hold token ids from 0 to {self.vocab_size - 1}, which are the model's vocabulary"
        raise InvalidRequest.refusing("prompt", must=must, found=str(stray))

    def _show(self, token_id: int) -> str:
        name = self._pieces.name(token_id)
        if name is None:
            return f"<id:{token_id}>"
        piece = self._pieces.middle(token_id)
        if piece is None:
            return name
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _encodings(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Encoding]:
    """Cut texts into tokens with Python's lock released, which the library's `encode` of one text holds throughout."""
    encodings: list[Encoding] = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return encodings


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"half of a surrogate pair (U+{ord(text[error.start]):04X}) at character {error.start}"
        raise InvalidRequest.refusing("prompt", must="be Unicode text", found=half) from error


def _card(loaded: PreTrainedTokenizerBase) -> TokenizerCard:
    named = loaded.special_tokens_map.items()
    texts = tuple((name, str(token)) for name, token in named if isinstance(token, str | AddedToken))
    return TokenizerCard(kind=type(loaded).__name__, special_tokens=texts)


def _outer_ids(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find the special tokens that the tokenizer puts before a text, and behind it.

    The latter close a text that is embedded; a completion goes on from its prompt without them.
    """
    words = models.WordLevel({"a": 0}, unk_token="a")  # nosec B106 # no secret
    probe = Tokenizer(words)
    probe.pre_tokenizer = pre_tokenizers.Whitespace()
    encoding: Encoding = tokenizer.post_process(probe.encode("a"), add_special_tokens=True)
    body = encoding.special_tokens_mask.index(0)
    return tuple(encoding.ids[:body]), tuple(encoding.ids[body + 1 :])


def _unknown_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the token for characters outside the vocabulary: it is special, but controls nothing."""
    name = getattr(tokenizer.model, "unk_token", None)
    token_id = None if name is None else tokenizer.token_to_id(name)
    return frozenset() if token_id is None else frozenset([token_id])


def sharing_model(tokenizer: Tokenizer) -> Tokenizer | None:
    """Return a second tokenizer over the same vocabulary and merges in memory (45 MB for 152k tokens).

    None where added tokens would have other ids: the library numbers them anew, behind each other.
    """
    twin = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (found := getattr(tokenizer, part)) is not None:
            setattr(twin, part, found)
    added: Mapping[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    for token_id in sorted(added):
        twin.add_tokens([added[token_id]])
    return twin if twin.get_added_tokens_decoder() == added else None


Span = tuple[int, int]
MAX_ROUNDS = 4
"""What a cut leaves can be found special anew only where names overlap; what still is after so many is all text."""


def encode_rendered(
    text: str,
    foreign: Sequence[int],
    *,
    encode: Callable[[list[str]], Sequence[Encoding]],
    encode_literally: Callable[[list[str]], Sequence[Encoding]],
    special_ids: Container[int],
) -> tuple[int, ...]:
    """Give the text's tokens, none of them special that reaches over a foreign character.

    foreign: places in the text, in rising order
    encode:  with places of tokens;  encode_literally: in which names of special tokens are text

    The library itself says what it takes for special. Where that reaches over a foreign character, the name is cut
    out and is a text of its own. A text without such names has the tokens that `encode` gives it.
    """
    found: dict[Span, Sequence[int]] = {}
    literal: list[Span] = []
    open_spans: list[Span] = [(0, len(text))]
    for _ in range(MAX_ROUNDS):
        encodings = encode([text[start:end] for start, end in open_spans])
        spans, open_spans = open_spans, []
        for span, encoding in zip(spans, encodings, strict=True):
            strays = list(_strays(encoding, span[0], foreign, special_ids))
            if not strays:
                found[span] = encoding.ids
                continue
            literal += strays
            open_spans += _between(span, strays)
        if not open_spans:
            break
    literal += open_spans
    encodings = encode_literally([text[start:end] for start, end in literal])
    found |= {span: encoding.ids for span, encoding in zip(literal, encodings, strict=True)}
    return tuple(token_id for span in sorted(found) for token_id in found[span])


def _strays(encoding: Encoding, start: int, foreign: Sequence[int], special_ids: Container[int]) -> Iterator[Span]:
    """Yield the spans of special tokens that reach over a foreign character, in places of the whole text."""
    for token_id, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
        if token_id in special_ids and first < last:
            at = bisect_left(foreign, start + first)
            if at < len(foreign) and foreign[at] < start + last:
                yield start + first, start + last


def _between(span: Span, strays: Sequence[Span]) -> Iterator[Span]:
    """Yield what is left of a span, without empty parts."""
    start = span[0]
    for first, last in (*strays, (span[1], span[1])):
        if start < first:
            yield start, first
        start = last


def meant_places(tokenizer: TextTokenizer, token_ids: Sequence[int], *, shows_special: bool = False) -> list[int]:
    """Return for each token how many characters precede it in the decoded text.

    shows_special: special tokens are shown in it by their names
    """
    detokenizer = tokenizer.detokenizer([], shows_special=shows_special)
    places = []
    for token_id in token_ids:
        places.append(detokenizer.place_of(token_id))
        detokenizer.feed(token_id)
    return places


def written_places(tokenizer: TextTokenizer, written: str, token_ids: Sequence[int]) -> list[int]:
    """Return for each token how many characters precede it in the text that was tokenized.

    A special token stands where its name is written, and has no text where it is not. What is written between two of
    them is most often what the tokens between them mean. A tokenizer may have thought a space before it, or have left
    white space out at either end; where it changed anything else, places are as near as the lengths allow.
    """
    meant, meaning = meant_places(tokenizer, token_ids), tokenizer.decode(token_ids)
    places: list[int] = []
    begin = meant_begin = 0
    for index, name_begin, name_end in _names(tokenizer, written, token_ids):
        meant_end = meant[index] if index < len(meant) else len(meaning)
        move = begin + _move(written[begin:name_begin], meaning[meant_begin:meant_end]) - meant_begin
        places += [min(max(begin, place + move), name_begin) for place in meant[len(places) : index]]
        places.append(name_begin)
        begin, meant_begin = name_end, meant_end
    return places[: len(token_ids)]


def _names(tokenizer: TextTokenizer, written: str, token_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the special tokens whose names are written out, with begin and end of the name; then the text's end."""
    end = 0
    missing: set[int] = set()
    for index, token_id in enumerate(token_ids):
        if token_id not in tokenizer.special_ids or token_id in missing:
            continue
        name = tokenizer.token_text(token_id)
        begin = written.find(name, end)
        if begin < 0:
            missing.add(token_id)  # nor is it behind what comes next
            continue
        end = begin + len(name)
        yield index, begin, end
    yield len(token_ids), len(written), len(written)


def _move(written: str, meaning: str) -> int:
    """Return how far the decoded text stands behind the written one, if one of the two ends with the other."""
    if written.startswith(meaning) or not (written.endswith(meaning) or meaning.endswith(written)):
        return 0
    return len(written) - len(meaning)
