"""Private parts of a library change without notice: each is used in one module, and a bound on versions protects it."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from functools import cache

import pytest
from packaging.requirements import Requirement

from tests.house.lock import pins
from tests.house.mentions import mentions
from tests.house.sources import MODULES, PACKAGE, REPOSITORY, nodes_of, text_of

USES = {
    "deployments/pinned_router.py": 1,  # a module by itself, since Serve pickles it by value
    "deployments/ray_private.py": 4,
    "engine/decoder/transformers_private.py": 7,
    "kernels/torch_private.py": 8,
}
"""How many private parts each of these modules uses. The fewer, the better."""
BOUNDED = ("ray", "torch", "transformers")
DOCUMENTED = {"os._exit"}
OF_TUPLES_AND_ENUMS = {"_asdict", "_replace", "_value_"}  # public, and named so that no field or member is


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_TUPLES_AND_ENUMS


@cache
def definitions() -> Counter[str]:
    """How often the service itself gives something a name."""
    found: Counter[str] = Counter()
    for file in MODULES:
        for node in nodes_of(text_of(file)):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found[name] += 1
                case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                    found[name] += 1
                case ast.Name(id=name, ctx=ast.Store()):
                    found[name] += 1
    return found


def private_parts_of(source: str) -> list[str]:
    """Return the private names that a file imports from a library, or finds on what a library made."""
    found = []
    for node, name in mentions(source):
        first, *rest = name.split(".")
        if isinstance(node, ast.Import | ast.ImportFrom):
            is_theirs = first != "serve_app" and any(map(is_private, rest))
        elif isinstance(node, ast.Attribute | ast.Call) and rest and name not in DOCUMENTED:
            of_our_own = 2 if ast.unparse(node).startswith("super().") else 1  # an override is a definition, too
            is_theirs = is_private(rest[-1]) and definitions()[rest[-1]] < of_our_own
        else:
            is_theirs = False
        found += [name] if is_theirs else []
    return found


def test_a_private_part_of_a_library_is_used_in_the_one_module_for_it() -> None:
    found = {str(file.relative_to(PACKAGE)): private_parts_of(text_of(file)) for file in MODULES}
    assert {name: parts for name, parts in found.items() if parts and name not in USES} == {}
    assert {name: len(found[name]) for name in USES} == USES


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("import torch; torch._dynamo_of_theirs", True),
        ("from torch import cpu as c; c._is_it_there()", True),
        ("from ray._private.utils import get_num_cpus", True),
        ("import ray._private", True),
        ("getattr(model, '_can_they')", True),
        ("super()._choose_replica_for_request(pending)", True),
        ("import torch; torch.cpu.get_capabilities()", False),
        ("self._engine", False),
        ("model.__class__", False),
        ("import os; os._exit(1)", False),
    ],
)
def test_a_private_part_is_told_from_our_own_and_from_public_ones(source: str, is_found: bool) -> None:
    assert bool(private_parts_of(source)) is is_found


def test_versions_are_bounded_where_private_parts_are_used_and_pinned_within_the_bounds() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    assert [name for name in BOUNDED if not any(each.operator == "<" for each in wanted[name])] == []
    pinned = dict(pins((REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()))
    pinned = {name.lower().replace("_", "-"): version for name, version in pinned.items()}
    assert [name for name, bounds in wanted.items() if pinned[name.lower().replace("_", "-")] not in bounds] == []
