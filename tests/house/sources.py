"""The files of the service as tests of the house read them; each is read once, and parsed once in a file of tests."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "serve_app"
MODULES = sorted(PACKAGE.rglob("*.py"))


@cache
def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Of a file's text, its module first. What is kept is dropped at the end of each file of tests: it is large."""
    return tuple(ast.walk(ast.parse(source)))
