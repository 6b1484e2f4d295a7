"""Defines a sample, a prompt with its completion, and the split of training from held-out prompts."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

Split = Literal["train", "held_out"]

HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A text of the corpus: `prompt` is what the model is given, `completion` what should follow it."""

    prompt: str
    completion: str

    @property
    def text(self) -> str:
        return self.prompt + self.completion


Draw = Callable[[Random], Sample]


def split_of(prompt: str) -> Split:
    """Say to which split a prompt belongs; a digest decides, so that no prompt is ever in both."""
    share = hashlib.sha256(prompt.encode()).digest()[0] / 256
    return "held_out" if share < HELD_OUT_SHARE else "train"


def draw_from_split(draw: Draw, random: Random, *, split: Split) -> Sample:
    """Draw samples until one has a prompt of the wanted split."""
    while True:
        sample = draw(random)
        if split_of(sample.prompt) == split:
            return sample
