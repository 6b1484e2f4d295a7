"""Draws the second course of the base model: gaps to fill and questions to answer, among documents of the first."""

from collections.abc import Callable, Iterator
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tools.demo_model.chats import draw_fact_chat
from tools.demo_model.corpus import KINDS, documents, fim_sample
from tools.demo_model.facts import draw_question, draw_statement
from tools.demo_model.functions import draw_function, draw_function_text, draw_module
from tools.demo_model.samples import Draw, Sample, draw_from_split
from tools.demo_model.stories import draw_story
from tools.demo_model.tokens import END_OF_TEXT, IM_END

IGNORED = -100
ROW_LENGTH = 256

Lesson = Callable[[Random], Sample]


def draw_gap(random: Random) -> Sample:
    """Draw a function with a gap, of those whose text is in the training split by every form of it."""
    return fim_sample(draw_function_text(random, split="train"), random)


def draw_gap_in_prose(random: Random) -> Sample:
    """Draw a story or a module with a gap."""
    draw = random.choice((draw_story, draw_module))
    return fim_sample(draw_from_split(draw, random, split="train").text, random)


def _of(draw: Draw) -> Lesson:
    def lesson(random: Random) -> Sample:
        sample = draw_from_split(draw, random, split="train")
        is_closed = sample.completion.endswith(f"{IM_END}\n")
        return sample if is_closed else Sample(prompt=sample.prompt, completion=sample.completion + END_OF_TEXT)

    return lesson


# how often each is drawn; only what follows the prompt counts
LESSONS: dict[Lesson, int] = {
    draw_gap: 56, draw_gap_in_prose: 3, _of(draw_fact_chat): 18, _of(draw_question): 5,
    _of(draw_statement): 6, _of(draw_function): 6,
}  # fmt: skip
# how many lessons there are to one document of the first course, of which every token counts
NUM_LESSONS_PER_DOCUMENT = 9


def lesson_rows(tokenizer: PreTrainedTokenizerFast, random: Random) -> Iterator[tuple[list[int], list[int]]]:
    """Fill rows of `ROW_LENGTH` tokens, without end; tokens and labels, `IGNORED` where a token does not count."""
    pairs = _lessons_and_documents(tokenizer, random)
    while True:
        tokens: list[int] = []
        labels: list[int] = []
        while len(tokens) < ROW_LENGTH:
            more_tokens, more_labels = next(pairs)
            tokens, labels = tokens + more_tokens, labels + more_labels
        yield tokens[:ROW_LENGTH], labels[:ROW_LENGTH]


def lesson_batches(
    tokenizer: PreTrainedTokenizerFast, *, seed: int, num_tokens: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw batches of tokens and labels, both [rows, `ROW_LENGTH`]."""
    rows = lesson_rows(tokenizer, Random(seed))
    while True:
        batch = [next(rows) for _ in range(num_tokens // ROW_LENGTH)]
        yield torch.tensor([tokens for tokens, _ in batch]), torch.tensor([labels for _, labels in batch])


def _lessons_and_documents(tokenizer: PreTrainedTokenizerFast, random: Random) -> Iterator[tuple[list[int], list[int]]]:
    lessons, weights = tuple(LESSONS), tuple(LESSONS.values())
    texts = documents(random, split="train", kinds=KINDS)
    while True:
        if random.randrange(NUM_LESSONS_PER_DOCUMENT + 1) == 0:
            tokens = tokenizer.encode(next(texts), add_special_tokens=False)
            yield tokens, tokens
            continue
        lesson = random.choices(lessons, weights)[0](random)
        prompt = tokenizer.encode(lesson.prompt, add_special_tokens=False)
        completion = tokenizer.encode(lesson.completion, add_special_tokens=False)
        yield prompt + completion, [IGNORED] * len(prompt) + completion
