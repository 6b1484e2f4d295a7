"""Finds where tokens stand, in characters, in the text they mean and in the text they were cut from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from serve_app.text.tokenizer import TextTokenizer


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
