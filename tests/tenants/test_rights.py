"""Patterns of models that a tenant may use."""

from __future__ import annotations

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
