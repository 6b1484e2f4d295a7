"""The table of rooms and walls, from the walls that every import is held to."""

from __future__ import annotations

import ast

from tests.docs.markdown import code, table
from tests.house.test_walls import PACKAGE, WALLS


def walls() -> str:
    """Every room that there is, from the ground up: its door plate and what it may import."""
    return table(
        ["room", "what is in it", "may import of ours", "of others"],
        [
            [code(room), _door_plate(room), _listed(wall.ours), _listed(wall.theirs) if wall.theirs else "–"]
            for room, wall in WALLS.items()
            if (PACKAGE / room).is_dir()
        ],
    )


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(name for name in names if name not in WALLS or (PACKAGE / name).is_dir())) or "–"


def _door_plate(room: str) -> str:
    plate = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8")))
    assert plate is not None
    title, sign, rest = " ".join(plate.split()).removesuffix(".").replace("<->", "↔").partition(": ")
    return f"**{title.capitalize().replace(' ray', ' Ray')}**{sign}{rest}"
