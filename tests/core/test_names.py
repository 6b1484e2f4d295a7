"""Model references."""

from __future__ import annotations

import pytest

from serve_app.core.names import ModelRef


@pytest.mark.parametrize(("adapter", "name"), [(None, "demo"), ("pirate", "demo:pirate")])
def test_a_reference_is_named_as_clients_write_it(adapter: str | None, name: str) -> None:
    assert ModelRef(base="demo", adapter=adapter).name == name
