"""A test waits for what comes, and gives up long after a slow machine would have come so far."""

from __future__ import annotations

import ast

import pytest

from tests.house.sources import REPOSITORY, nodes_of, text_of

LEAST_S = 30.0
"""Of a bound on a wait. What is below a second is a pause between two looks."""
BY_PLACE = {"timeout": 0, "wait_for": 1, "wait": 0, "join": 0, "result": 0}
"""Calls that bound a wait, by the place of the bound among their arguments."""
OF_HTTPX = {"get", "post", "put", "patch", "delete", "request", "stream", "Client", "AsyncClient"}
"""They give up after five seconds where nobody says when."""


def hasty(source: str) -> list[int]:
    """Lines that give up too soon."""
    found = []
    for call in nodes_of(source):
        if isinstance(call, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            place = BY_PLACE.get(name, len(call.args))
            bounds = [*call.args[place : place + 1], *(each.value for each in call.keywords if each.arg == "timeout")]
            found += [call.lineno for bound in bounds if is_short(bound)]
            found += [call.lineno] if is_hasty_by_default(call) else []
    return found


def is_hasty_by_default(call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(value=ast.Name(id="httpx"), attr=name) if name in OF_HTTPX:
            return not {each.arg for each in call.keywords} & {"timeout", "transport"}
    return False


def is_short(bound: ast.expr) -> bool:
    return isinstance(bound, ast.Constant) and isinstance(bound.value, int | float) and 1 <= bound.value < LEAST_S


def test_no_wait_of_a_test_ends_before_a_slow_machine_is_done() -> None:
    files = sorted((REPOSITORY / "tests").rglob("*.py"))
    found = {str(file.relative_to(REPOSITORY)): lines for file in files if (lines := hasty(text_of(file)))}
    assert found == {}, f"give it {LEAST_S:g} s or more"


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("await asyncio.wait_for(task, 5)", True),
        ("await asyncio.wait_for(task, timeout=5)", True),
        ("async with asyncio.timeout(5): pass", True),
        ("thread.join(10)", True),
        ("httpx.get(url)", True),
        ("httpx.Client(transport=transport)", False),
        ("await asyncio.wait_for(task, 60)", False),
        ("event.wait(0.001)", False),
        ("', '.join(names)", False),
    ],
)
def test_a_short_bound_is_told_from_others(line: str, is_found: bool) -> None:
    source = f"async def waits():\n    {line}\n"
    assert bool(hasty(source)) is is_found
