"""A gap to fill: what stands behind it, and the other files of its project."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SuffixMode(StrEnum):
    """What is done with a suffix."""

    FIM = "fim"
    APPEND = "append"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraFile:
    """A file of the same project, or a piece of one."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Infill:
    """What a model that fills gaps is told beside the prompt, which stands before the gap.

    suffix:  the text behind the gap
    opening: how the text in the gap begins; it is not returned
    files:   for context, those that matter most last
    """

    suffix: str
    opening: str = ""
    files: tuple[ExtraFile, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.suffix, self.opening, *(text for file in self.files for text in (file.name, file.text)))
