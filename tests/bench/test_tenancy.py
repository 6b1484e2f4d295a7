"""How many calls keys, limits and the ledger add to a request: a bound on their work that no machine's speed moves."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Awaitable
from types import FrameType

from starlette.types import ASGIApp

from benchmarks.bench_tenancy import UNSEEN, Setup, kinds_of_refusals, spend

NUM_REQUESTS = 16
NUM_ROUNDS = 8
MAX_CALLS = {"keys": 8, "books": 95}
"""Of functions of this project per request, beyond what a request takes where nobody is asked for a key."""


async def calls(setup: Setup, name: str) -> float:
    """Per request, once nothing is new and where no lease has to be renewed meanwhile."""
    app = setup.apps()[name]
    return min([await counted(setup, app) for _ in range(NUM_ROUNDS)]) / NUM_REQUESTS


async def counted(setup: Setup, app: ASGIApp) -> int:
    return (await called(spend(setup, app, NUM_REQUESTS))).total()


async def called(work: Awaitable[object]) -> Counter[str]:
    """Functions of this project, by name."""
    found = Counter[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("serve_app."):
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        await work
    finally:
        sys.setprofile(None)
    return found


async def test_keys_limits_and_the_ledger_add_few_calls_to_a_request() -> None:
    setup = await Setup.make()
    plain = await calls(setup, "none")
    more = {name: await calls(setup, name) - plain for name in MAX_CALLS}
    await setup.fleet.close()
    assert all(more[name] <= MAX_CALLS[name] for name in more), (plain, more)


async def test_what_may_not_be_used_is_refused_by_the_same_work_as_what_is_not_there() -> None:
    setup = await Setup.make()
    kinds = await kinds_of_refusals(setup)
    done = {}
    for name, kind in kinds.items():
        await kind.ask(2)
        done[name] = await called(kind.ask(NUM_REQUESTS))
    await setup.fleet.close()
    for what in UNSEEN:
        assert done[f"hidden {what}"].total() > NUM_REQUESTS
        assert done[f"hidden {what}"] == done[f"unknown {what}"], what
