"""What a full collection looks at once a model is loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from serve_app.engine.collector import exempt_what_is_loaded


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.slow
def test_a_full_collection_looks_at_nothing_that_was_loaded_before() -> None:
    num_loaded = len(gc.get_objects())
    exempt_what_is_loaded()
    gc.collect()
    assert len(gc.get_objects()) < num_loaded / 100


def test_what_has_come_since_is_still_collected() -> None:
    exempt_what_is_loaded()
    circle: list[object] = []
    circle.append(circle)
    del circle
    assert gc.collect() >= 1
