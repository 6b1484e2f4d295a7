"""Every import obeys the walls: which room may know which room, and which library."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.house.sources import MODULES, PACKAGE, REPOSITORY, nodes_of, text_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Wall:
    """What a room may import beside itself and the standard library."""

    ours: frozenset[str] = frozenset()
    theirs: frozenset[str] = frozenset()


def wall(ours: str = "", theirs: str = "") -> Wall:
    return Wall(ours=frozenset(ours.split()), theirs=frozenset(theirs.split()))


WALLS = {
    "core": wall(theirs="annotated_types"),
    "sandbox": wall("core"),
    "api": wall("core", "pydantic"),
    "catalog": wall("core", "fsspec aiohttp"),
    "tenants": wall("core", "sqlalchemy"),
    "text": wall("core", "transformers tokenizers"),
    "tools": wall("core"),
    "constraints": wall("core sandbox", "llguidance"),
    "templates": wall("core sandbox", "jinja2"),
    "kernels": wall(theirs="torch triton llvmlite"),
    "replica": wall("core text constraints templates"),
    "engine": wall(
        "core text constraints templates kernels replica sandbox",
        "torch transformers peft safetensors PIL flashinfer annotated_types",
    ),
    "backends": wall("core text replica engine kernels", "vllm torch safetensors"),
    "router": wall("core api catalog tenants tools"),
    "observe": wall("core api router", "opentelemetry"),
    "http": wall("core api router", "starlette prometheus_client pyarrow"),
    "deployments": wall(
        "core api catalog tenants engine backends replica router observe http", "ray starlette pydantic"
    ),
    "check": wall("core backends catalog engine deployments", "ray pydantic yaml"),
    "whatif": wall("core check deployments engine router", "pydantic"),
    "offline": wall("api core deployments http router", "pyarrow"),
    "cli": wall("api catalog check core offline tenants whatif", "click prometheus_client psutil ray rich typer yaml"),
    "lab": wall("cli", "openai pandas numpy matplotlib IPython prometheus_client yaml"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One module that a line brings in."""

    line: int
    module: str


def imports_of(source: str) -> Iterator[Import]:
    """Every import of a file, those inside functions and type-checking blocks included."""
    for node in nodes_of(source):
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(line=node.lineno, module=alias.name)
            case ast.ImportFrom(level=0, module=str(module)):
                if module == "serve_app":
                    for alias in node.names:
                        yield Import(line=node.lineno, module=f"serve_app.{alias.name}")
                else:
                    yield Import(line=node.lineno, module=module)
            case ast.ImportFrom():
                yield Import(line=node.lineno, module=".")
            case ast.Call(func=ast.Name(id="__import__") | ast.Attribute(attr="import_module")):
                yield Import(line=node.lineno, module="(computed at run time)")


def breaches(room: str, source: str) -> list[str]:
    """What a file of that room imports and may not."""
    allowed = WALLS[room]
    found = []
    for each in imports_of(source):
        top, _, rest = each.module.partition(".")
        if top == "serve_app":
            is_allowed = rest.split(".")[0] in allowed.ours | {room}
        else:
            is_allowed = top in sys.stdlib_module_names or top in allowed.theirs
        if not is_allowed:
            found.append(f"line {each.line}: {each.module}")
    return found


def room_of(file: Path) -> str:
    first = file.relative_to(PACKAGE).parts[0]
    return first if (PACKAGE / first).is_dir() else "cli"  # __main__.py, __init__.py


def test_every_room_stands_on_rooms_named_before_it() -> None:
    rooms = list(WALLS)
    for at, room in enumerate(rooms):
        assert WALLS[room].ours <= set(rooms[:at]), f"{room} looks up"


def test_the_engine_knows_of_a_replica_only_what_it_implements() -> None:
    engine = [file for file in MODULES if room_of(file) == "engine"]
    known = {each.module for file in engine for each in imports_of(text_of(file))}
    assert {name for name in known if name.startswith("serve_app.replica")} == {"serve_app.replica.engine"}


def modules_beneath(module: str, known: dict[str, Path]) -> set[str]:
    """The modules of the house that one module imports when it is loaded or later."""
    imported = {each.module for each in imports_of(text_of(known[module]))}
    return {name for name in imported if name in known and name != module}


def test_no_module_imports_itself_in_a_circle() -> None:
    known = {".".join(file.relative_to(REPOSITORY).with_suffix("").parts): file for file in MODULES}
    sorter = TopologicalSorter({module: modules_beneath(module, known) for module in known})
    sorter.prepare()  # raises CycleError, which names the circle


@pytest.mark.law("Walls")
def test_every_import_obeys_the_walls() -> None:
    assert {room_of(file) for file in MODULES} <= WALLS.keys(), "a room without walls: add it to the table"
    found = {str(file.relative_to(PACKAGE)): breaches(room_of(file), text_of(file)) for file in MODULES}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("core", "import pydantic"),
        ("api", "from serve_app.tenants.keys import Key"),
        ("router", "def f():\n    import torch"),
        ("replica", "import torch"),
        ("replica", "from serve_app.engine.config import EngineConfig"),
        ("engine", "from ray import serve"),
        ("catalog", "from serve_app import engine"),
        ("text", "from . import stops"),
        ("router", "import importlib\nimportlib.import_module('torch')"),
        ("api", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import starlette.types"),
    ],
)
def test_a_breach_is_found_wherever_it_stands(room: str, source: str) -> None:
    assert len(breaches(room, source)) == 1


def test_kernels_are_asked_for_through_the_rooms_interface() -> None:
    """Beside names for types; so a folder of kernels can be left out."""
    for file in MODULES:
        if room_of(file) == "kernels":
            continue
        for node in nodes_of(text_of(file)):
            if isinstance(node, ast.ImportFrom) and re.match(r"serve_app\.kernels\.[cg]pu", node.module or ""):
                is_for_types = node.col_offset > 0 and all(name.name[0].isupper() for name in node.names)
                assert is_for_types, f"{file}:{node.lineno}"
