"""What is wrong, or worth knowing, at a place of a cluster file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

Path = tuple[str | int, ...]
"""Keys and list indices from the top of the file down to a value."""


class Severity(StrEnum):
    """Only an error keeps the file from being served."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report; `path` is where in the file, empty for the file as a whole."""

    path: Path
    message: str
    severity: Severity = Severity.ERROR


def spelled(path: Path) -> str:
    """The path as a person would write it: `applications[0].args.name`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text
