"""Tables in Markdown, and the places of a page that are written from the code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

SECTION = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells may hold anything but a line break; bars in them are escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(_escaped(cell) for cell in line) + " |\n" for line in lines)


def code(value: object) -> str:
    return f"`{value}`"


def codes(values: Iterable[object]) -> str:
    return ", ".join(map(code, values))


def filled(page: str, sections: Mapping[str, Callable[[], str]]) -> str:
    """The page with every generated section written anew. Raises KeyError for a section that nobody writes."""
    return SECTION.sub(lambda found: f"{found[1]}\n{sections[found['name']]().strip()}\n\n{found[3]}", page)


def sections_of(page: str) -> list[str]:
    return [found["name"] for found in SECTION.finditer(page)]


def _escaped(cell: str) -> str:
    assert "\n" not in cell, f"{cell!r} is no cell of a table"
    return re.sub(r"(?<!\\)\|", r"\\|", cell)
