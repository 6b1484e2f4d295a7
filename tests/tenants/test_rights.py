"""Patterns of models that a tenant may use."""

from __future__ import annotations

import random
import re

import pytest

from serve_app.core.tenants import Rights


@pytest.mark.parametrize(
    ("pattern", "base", "adapter", "is_allowed"),
    [
        ("*", "demo", None, True),
        ("*", "demo", "pirate", True),
        ("demo", "demo", None, True),
        ("demo", "demo", "pirate", False),
        ("demo", "demo2", None, False),
        ("demo*", "demo2", None, True),
        ("demo*", "demo", "pirate", False),
        ("demo:*", "demo", "pirate", True),
        ("demo:*", "demo", None, False),
        ("demo:pi*", "demo", "pirate", True),
        ("demo:pi*", "demo", "json", False),
        ("*:pirate", "demo", "pirate", True),
        ("*:pirate", "demo", "pirate2", False),
        ("de.o", "demo", None, False),
        ("d*m*", "demo", None, True),
        ("*m*o", "demomo", None, True),
        ("*e*e*", "demo", None, False),
        ("**", "demo", None, True),
        ("*:*", "demo", None, False),
    ],
)
def test_a_pattern_is_of_what_it_says(pattern: str, base: str, adapter: str | None, is_allowed: bool) -> None:
    assert Rights((pattern,)).allow(base, adapter) is is_allowed


def test_no_pattern_allows_nothing() -> None:
    assert not Rights(()).allow("demo")
    assert not Rights(()).touch("demo")


def test_a_base_is_touched_by_a_pattern_of_its_adapters() -> None:
    rights = Rights(("demo:pirate", "other"))
    assert rights.touch("demo")
    assert not rights.allow("demo")
    assert not rights.touch("dem")


def test_patterns_agree_with_a_plain_definition_and_many_stars_end_in_time() -> None:
    dice = random.Random(5)
    for _ in range(3000):
        pattern = "".join(dice.choices("ab*", k=dice.randrange(8)))
        name = "".join(dice.choices("ab", k=dice.randrange(8)))
        is_like = re.fullmatch(pattern.replace("*", ".*"), name) is not None
        assert Rights((pattern,)).allow(name) is (is_like or pattern == "*"), (pattern, name)
    assert not Rights(("*a" * 48 + "b",)).allow("a" * 96)
