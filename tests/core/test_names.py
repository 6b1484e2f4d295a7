"""Model references."""

from __future__ import annotations

import pytest

from serve_app.core.names import ModelRef, Part, mixed


@pytest.mark.parametrize(("adapter", "name"), [(None, "demo"), ("pirate", "demo:pirate")])
def test_a_reference_is_named_as_clients_write_it(adapter: str | None, name: str) -> None:
    assert ModelRef(base="demo", adapter=adapter).name == name


def part(name: str, scale: float) -> Part:
    return Part(adapter=name, version=f"v-{name}", scale=scale)


def test_a_mix_is_the_same_however_it_was_written() -> None:
    first = mixed("demo", [part("a", 0.7), part("b", 0.3)])
    assert first == mixed("demo", [part("b", 0.3), part("c", 0.0), part("a", 0.2), part("a", 0.5)])
    assert (first.name, [each.adapter for each in first.parts]) == ("demo:a*0.7+b*0.3", ["a", "b"])
    others = [[part("a", 0.3), part("b", 0.7)], [part("a", 0.7)], [part("a", 0.7), part("b", -0.3)], [part("b", 0.3)]]
    versions = {first.version, "", "v-a", "v-b", *(mixed("demo", other).version for other in others)}
    assert len(versions) == 4 + len(others), "no two have the same version"


def test_a_mix_of_another_version_of_an_adapter_is_another_mix() -> None:
    newer = Part(adapter="a", version="v-a2", scale=0.7)
    assert mixed("demo", [newer]).version != mixed("demo", [part("a", 0.7)]).version
