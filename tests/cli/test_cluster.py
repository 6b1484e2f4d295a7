"""How often the process that holds a cluster asks Serve how far it is."""

from __future__ import annotations

import pytest

from serve_app.cli.cluster import TELL_S, TELL_SETTLED_S, pause_after


@pytest.mark.parametrize(
    ("statuses", "pause_s"),
    [
        ([], TELL_S),
        (["RUNNING"], TELL_SETTLED_S),
        (["RUNNING", "RUNNING"], TELL_SETTLED_S),
        (["RUNNING", "DEPLOYING"], TELL_S),
        (["UNHEALTHY"], TELL_S),
    ],
)
def test_serve_is_seldom_asked_where_all_run(statuses: list[str], pause_s: float) -> None:
    told = {f"app-{number}": {"status": status} for number, status in enumerate(statuses)}
    assert pause_after(told) == pause_s
