"""Every symptom that the page quotes is said by the code in these words."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.docs.sections import REPOSITORY

PAGE = REPOSITORY / "docs" / "troubleshooting.md"
ROW = re.compile(r"^\| (?P<seen>[^|]+) \| (?P<why>[^|]+) \| (?P<do>[^|]+) \|$", re.MULTILINE)
NO_MESSAGE = re.compile(r"[\w.-]+|X-[\w-]+")
"""A name, which other tests look for."""


@cache
def said() -> tuple[str, ...]:
    """Every text in the code, values that are filled in as an ellipsis."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in (REPOSITORY / "serve_app").rglob("*.py")]
    return tuple(filter(None, (text_of(node) for tree in trees for node in ast.walk(tree))))


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return re.sub(r"%[\w.]+", "…", node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def is_said(message: str) -> bool:
    """Whether one text has all parts of it in this order."""
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
    wanted = re.compile(".*".join(parts), re.DOTALL)
    return any(wanted.search(text) for text in said())


def symptoms() -> list[str]:
    rows = [found["seen"] for found in ROW.finditer(PAGE.read_text(encoding="utf-8"))]
    quoted = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
    return [span for span in quoted if not NO_MESSAGE.fullmatch(span)]


@pytest.mark.parametrize("message", symptoms())
def test_a_symptom_is_said_by_the_code(message: str) -> None:
    assert is_said(message)


def test_symptoms_are_found_and_what_nobody_says_is_not() -> None:
    assert len(symptoms()) > 20
    assert not is_said("The gremlins … have eaten it.")
    assert not is_said("are free beside … does not fit:")


def test_every_row_says_what_to_do() -> None:
    rows = list(ROW.finditer(PAGE.read_text(encoding="utf-8")))
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(rows) == len(lines)  # none has another number of cells
    assert all(found["do"].strip() for found in rows)
