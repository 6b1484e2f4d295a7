"""Several models side by side on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas

from serve_app.lab import markup
from serve_app.lab.completion import MAX_SHOWN, Completion, Completions


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What each model made of each prompt, computed in one request and in the same batches.

    completions: [models · prompts · n], in that order
    """

    prompts: tuple[str, ...]
    models: tuple[str, ...]
    completions: Completions

    @property
    def num_samples(self) -> int:
        """Completions of one model for one prompt."""
        return len(self.completions) // max(1, len(self.models) * len(self.prompts))

    def of(self, model: str, prompt: int = 0, sample: int = 0) -> Completion:
        """One of them, by the model's name and the place of its prompt."""
        row = self.models.index(model) * len(self.prompts) + prompt
        return self.completions[row * self.num_samples + sample]

    def row(self, prompt: int = 0, sample: int = 0) -> list[Completion]:
        """One prompt's, in the order of the models."""
        return [self.of(model, prompt, sample) for model in self.models]

    def first_difference(self, prompt: int = 0, sample: int = 0) -> int:
        """How many characters all models wrote alike before two of them part."""
        return common_length([each.text for each in self.row(prompt, sample)])

    def frame(self) -> pandas.DataFrame:
        """A row per prompt (and sample), a column per model."""
        return pandas.DataFrame(
            [[each.text for each in self.row(*place)] for place in self._places()],
            index=pandas.Index([self.prompts[prompt] for prompt, _ in self._places()], name="prompt"),
            columns=list(self.models),
        )

    def _repr_html_(self) -> str:
        rows = [
            markup.compared(
                self.prompts[place[0]], [each.text for each in self.row(*place)], self.first_difference(*place)
            )
            for place in self._places()[:MAX_SHOWN]
        ]
        return markup.side_by_side(["prompt", *self.models], rows, self.completions.foot())

    def _places(self) -> list[tuple[int, int]]:
        return [(prompt, sample) for prompt in range(len(self.prompts)) for sample in range(self.num_samples)]


def common_length(texts: Sequence[str]) -> int:
    """Characters at the beginning that all texts have alike."""
    length = min((len(text) for text in texts), default=0)
    return next((at for at in range(length) if len({text[at] for text in texts}) > 1), length)
