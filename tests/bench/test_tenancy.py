"""How many calls keys, limits and the ledger add to a request: a bound on their work that no machine's speed moves."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

from starlette.types import ASGIApp

from tests.bench.bench_tenancy import Setup, spend

NUM_REQUESTS = 16
NUM_ROUNDS = 8
MAX_CALLS = {"keys": 8, "books": 95}
"""Of functions of this project per request, beyond what a request takes where nobody is asked for a key."""


async def calls(setup: Setup, name: str) -> float:
    """Per request, once nothing is new and where no lease has to be renewed meanwhile."""
    app = setup.apps()[name]
    return min([await counted(setup, app) for _ in range(NUM_ROUNDS)]) / NUM_REQUESTS


async def counted(setup: Setup, app: ASGIApp) -> int:
    found = Counter[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("serve_app."):
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        await spend(setup, app, NUM_REQUESTS)
    finally:
        sys.setprofile(None)
    return found.total()


async def test_keys_limits_and_the_ledger_add_few_calls_to_a_request() -> None:
    setup = await Setup.make()
    plain = await calls(setup, "none")
    more = {name: await calls(setup, name) - plain for name in MAX_CALLS}
    await setup.fleet.close()
    assert all(more[name] <= MAX_CALLS[name] for name in more), (plain, more)
