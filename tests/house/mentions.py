"""What a file speaks of in other libraries, by whole names: `from torch import load as read` is `torch.load`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from tests.house.sources import nodes_of

UNKNOWN = "?"
NAMING = ast.Name | ast.Attribute | ast.Call


@cache
def imports_of(source: str) -> dict[str, str]:
    """Whole names by the names that the file has for them."""
    found = {}
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]
                found[each.asname or first] = each.name if each.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def whole_name(node: ast.AST, source: str) -> str:
    """Of a name, an attribute or `getattr` with a written name; UNKNOWN stands for what is computed."""
    if isinstance(node, ast.Name):
        return imports_of(source).get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{whole_name(node.value, source)}.{node.attr}"
    if isinstance(node, ast.Call) and whole_name(node.func, source) in ("getattr", "builtins.getattr"):
        attribute = node.args[1] if len(node.args) > 1 else None
        named = attribute.value if isinstance(attribute, ast.Constant) else UNKNOWN
        return f"{whole_name(node.args[0], source)}.{named}"
    return UNKNOWN


def mentions(source: str) -> Iterator[tuple[ast.AST, str]]:
    """Every place that names something, called there or handed on, with its whole name; imports too."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from ((node, each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node, f"{node.module}.{each.name}") for each in node.names)
        elif isinstance(node, NAMING) and (name := whole_name(node, source)) != UNKNOWN:
            yield node, name
