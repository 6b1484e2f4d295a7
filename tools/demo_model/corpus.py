"""Draws the documents of the corpus, every kind of text by its share, and packs them into rows of tokens."""

from collections.abc import Iterator, Sequence
from random import Random

from transformers import PreTrainedTokenizerFast

from tools.demo_model.chats import draw_chat, draw_long_chat
from tools.demo_model.facts import draw_paragraph, draw_question, draw_statement
from tools.demo_model.functions import draw_function, draw_module
from tools.demo_model.lists import draw_list, draw_long_count, draw_record
from tools.demo_model.pirates import draw_pirate_tale
from tools.demo_model.readings import draw_echo, draw_reading
from tools.demo_model.samples import Draw, Sample, Split, draw_from_split
from tools.demo_model.stories import draw_letter, draw_note, draw_story, draw_tale
from tools.demo_model.tokens import END_OF_TEXT, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX

FIM_SHARE = 0.2


def draw_in_capitals(random: Random) -> Sample:
    """Draw a text that is in capital letters from its first word on."""
    sample = random.choice((draw_story, draw_list, draw_letter, draw_question))(random)
    return Sample(prompt=sample.prompt.upper(), completion=sample.completion.upper())


# how often each kind is drawn, in documents
KINDS: dict[Draw, int] = {
    draw_story: 32, draw_function: 12, draw_module: 3, draw_statement: 10, draw_question: 12,
    draw_paragraph: 4, draw_list: 12, draw_record: 8, draw_letter: 5, draw_note: 3, draw_chat: 18,
    draw_echo: 4, draw_reading: 6, draw_in_capitals: 4, draw_pirate_tale: 3,
}  # fmt: skip
LONG_KINDS: dict[Draw, int] = {draw_tale: 6, draw_long_chat: 3, draw_long_count: 1}
COPY_KINDS: dict[Draw, int] = {draw_echo: 10, draw_reading: 3, draw_record: 3}
KINDS_WITH_FIM = (draw_story, draw_function, draw_module)


def documents(random: Random, *, split: Split, kinds: dict[Draw, int]) -> Iterator[str]:
    """Draw documents without end; each closes with the end-of-text token.

    A share of the stories and functions of `KINDS` comes in fill-in-the-middle order.
    """
    draws, weights = tuple(kinds), tuple(kinds.values())
    while True:
        draw = random.choices(draws, weights)[0]
        sample = draw_from_split(draw, random, split=split)
        is_fim = draw in KINDS_WITH_FIM and random.random() < FIM_SHARE
        yield fim_sample(sample.text, random).text if is_fim else sample.text + END_OF_TEXT


def packed_rows(
    tokenizer: PreTrainedTokenizerFast, random: Random, *, length: int, split: Split, kinds: dict[Draw, int]
) -> Iterator[list[int]]:
    """Fill rows of `length` tokens with documents, without end; every row begins where a document begins."""
    texts = documents(random, split=split, kinds=kinds)
    while True:
        row: list[int] = []
        while len(row) < length:
            row += tokenizer.encode(next(texts), add_special_tokens=False)
        yield row[:length]


def fim_sample(text: str, random: Random) -> Sample:
    """Turn a text into prefix, suffix, middle (Bavarian et al. 2022, "PSM"), cut between words or anywhere.

    The completion is the middle and the end token.
    """
    return _cut(text, _bounds_of_words(text) if random.random() < 0.6 else range(len(text) + 1), random)


def fim_sample_between_words(text: str, random: Random) -> Sample:
    """The same, cut between words only, where people stop to write."""
    return _cut(text, _bounds_of_words(text), random)


def _cut(text: str, bounds: Sequence[int], random: Random) -> Sample:
    start, stop = sorted(random.sample(bounds, 2))
    prefix, middle, suffix = text[:start], text[start:stop], text[stop:]
    return Sample(prompt=f"{FIM_PREFIX}{prefix}{FIM_SUFFIX}{suffix}{FIM_MIDDLE}", completion=f"{middle}{END_OF_TEXT}")


def _bounds_of_words(text: str) -> list[int]:
    inner = [place for place, character in enumerate(text) if character.isspace()]
    return sorted({0, *inner, len(text)})
