"""Reads YAML and remembers on which line each key stands; what is found at a place of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import yaml

MERGE_KEY = "tag:yaml.org,2002:merge"
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


class UnreadableYaml(Exception):
    """The text is no YAML; `line` is where reading stopped."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message, line)
        self.message = message
        self.line = line


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A YAML text as plain data, the lines of its keys, and the keys that were given twice."""

    data: Any
    lines: dict[Path, int]
    duplicates: tuple[Finding, ...]

    def line(self, path: Path) -> int:
        """The line of the value at `path`, or of the nearest one above it that the file has."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def read_document(text: str) -> Document:
    """The one YAML document in the text, with the line of each of its values. Raises UnreadableYaml."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return Document(data=None, lines={}, duplicates=())
        duplicates = tuple(_duplicates(node))  # before merge keys are flattened into their mappings
        data = loader.construct_document(node)
        lines = {path: (key or value).start_mark.line + 1 for path, key, value, _ in _walked(node)}
        return Document(data=data, lines=lines, duplicates=duplicates)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise UnreadableYaml(what or "not YAML", mark.line + 1 if mark else 1) from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UnreadableYaml(str(error).splitlines()[0] if str(error) else "not YAML", 1) from error
    finally:
        loader.dispose()


def _duplicates(node: yaml.Node) -> Iterator[Finding]:
    first_lines: dict[tuple[object, Path], int] = {}
    for path, key, _, visit in _walked(node):
        if key is not None and key.tag != MERGE_KEY:
            if (first := first_lines.get((visit, path))) is not None:
                message = f"{path[-1]!r} is given twice, first on line {first}; only the last would count"
                yield Finding(path=path, message=message)
            first_lines.setdefault((visit, path), key.start_mark.line + 1)


def _walked(
    node: yaml.Node, path: Path = (), above: tuple[int, ...] = ()
) -> Iterator[tuple[Path, yaml.Node | None, yaml.Node, object]]:
    """Yield the path of each value, the nodes of its key and of itself, and what is one for all values side by side.

    An alias to a node above is not followed.
    """
    visit, found = object(), list[tuple[str | int, yaml.Node | None, yaml.Node]]()
    if isinstance(node, yaml.MappingNode):
        found = [(str(key.value), key, value) for key, value in node.value]
    if isinstance(node, yaml.SequenceNode):
        found = [(index, None, value) for index, value in enumerate(node.value)]
    for step, key, value in () if id(node) in above else found:
        yield (*path, step), key, value, visit
        yield from _walked(value, (*path, step), (*above, id(node)))
