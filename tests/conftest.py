"""What every test starts from: Ray's switches are set before anything imports Ray."""

from __future__ import annotations

import os

import hypothesis
import pytest

os.environ.update(
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_worker_niceness="0",
    RAY_SERVE_LOG_TO_STDERR="0",
    OMP_WAIT_POLICY="PASSIVE",
    HF_HUB_OFFLINE="1",
)

# Random inputs are seeded: the same examples on every machine. HYPOTHESIS_SEARCH=1 looks for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=not os.environ.get("HYPOTHESIS_SEARCH"))
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a Ray cluster last: it takes a good part of a small machine even while it idles."""
    items.sort(key=lambda item: item.get_closest_marker("cluster") is not None)
