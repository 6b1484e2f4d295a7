"""What a full collection looks at once a model is loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from serve_app.deployments.loading import exempt_what_is_loaded, resting


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Before a test all is looked through, and behind it what was so before it began is exempt again."""
    gc.unfreeze()
    yield
    gc.freeze()


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


def test_nothing_is_looked_through_while_it_rests_and_all_is_afterwards() -> None:
    threshold = gc.get_threshold()[0]
    with resting():
        before = num_collections()
        kept = [[number] for number in range(threshold * 20)]
        assert num_collections() == before
    kept += [[number] for number in range(threshold * 2)]
    assert num_collections() > before


def test_it_looks_again_where_loading_failed() -> None:
    with pytest.raises(ValueError, match="broken"), resting():
        raise ValueError("broken")
    assert gc.isenabled()


def num_collections() -> int:
    return sum(each["collections"] for each in gc.get_stats())
