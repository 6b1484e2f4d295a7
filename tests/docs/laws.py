"""The list of laws and the tests that hold them, from the marker `law` of those tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.markdown import table

REPOSITORY = Path(__file__).parents[2]
STATED = re.compile(r"^\| \*\*(.+?)\*\* \| ", re.MULTILINE)


def laws() -> str:
    """Return the table of every law with its tests, in the order in which the laws are stated."""
    found: dict[str, list[str]] = {name: [] for name in stated()}
    for file in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        for name, test in held_by(file):
            found.setdefault(name, []).append(test)
    return table(
        ["law", "held by"], [[name, "<br>".join(f"`{each}`" for each in tests)] for name, tests in found.items()]
    )


def stated() -> list[str]:
    """Return the names of the laws that the architecture states."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    return STATED.findall(text[text.index("## Laws") : text.index("## Glossary")])


def held_by(file: Path) -> Iterator[tuple[str, str]]:
    """Yield law and test of every marker in a file of tests, and those of the file as a whole."""
    source = file.read_text(encoding="utf-8")
    if "mark.law(" not in source:
        return
    name = str(file.relative_to(REPOSITORY))
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ((law, f"{name}::{node.name}") for law in _laws_in(node.decorator_list))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            yield from ((law, name) for law in _laws_in([node.value]))


def _laws_in(nodes: list[ast.expr]) -> Iterator[str]:
    for outer in nodes:
        for node in ast.walk(outer):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.law":
                yield ast.literal_eval(node.args[0])
