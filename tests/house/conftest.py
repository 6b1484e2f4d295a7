"""What was parsed is given back after each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.house.sources import nodes_of


@pytest.fixture(scope="module", autouse=True)
def _parsed() -> Iterator[None]:
    yield
    nodes_of.cache_clear()
