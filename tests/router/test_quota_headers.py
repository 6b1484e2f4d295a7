"""What headers say that is left, over any story of two routers: requests that end, fail, and are cancelled waiting."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.errors import QuotaExceeded
from serve_app.core.tenants import Amount, Limits, Meter, Tenant, bounds_of
from serve_app.http.exchange import rate_headers
from serve_app.router.quotas import Permit, Quotas
from tests.router.test_quotas import FakeAccounts, quotas

LIMITS = Limits(requests_per_minute=40, tokens_per_minute=900, max_in_flight=12)
TENANT = Tenant(name="acme", limits=LIMITS)
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "end", "fail", "cancel"]),
        st.integers(0, 1),
        st.integers(1, 90),
        st.integers(0, 6),
    ),
    max_size=50,
)


def remaining(router: Quotas) -> dict[str, int]:
    found = {name.decode(): int(value) for name, value in rate_headers(router.rates(TENANT)) if b"remaining" in name}
    return {name.rpartition("-")[2]: number for name, number in found.items()}


@pytest.mark.law("Limits")
@settings(max_examples=60, deadline=None)
@given(MOVES)
def test_headers_say_what_the_limits_have_left_and_no_limit_is_exceeded(moves: list[tuple[str, int, int, int]]) -> None:
    asyncio.run(carry_out(moves))


async def carry_out(moves: list[tuple[str, int, int, int]]) -> None:
    """Time stands still, so that a minute holds all of it. What routers hold is left, and so is what nobody does."""
    accounts = FakeAccounts(LIMITS)
    routers = [quotas(accounts, name) for name in "ab"]
    permits, spent, reserved = list[tuple[Permit, int]](), Counter[str](), Counter[str]()
    for move, number, tokens, turns in moves:
        if move == "ask":
            try:
                permits.append((await routers[number].reserve(TENANT, Amount(requests=1, tokens=tokens)), tokens))
                reserved.update({"requests": 1, "tokens": tokens})
            except QuotaExceeded:
                pass
        elif move == "cancel":
            waiting = asyncio.create_task(routers[number].reserve(TENANT, Amount(requests=1, tokens=tokens)))
            for _ in range(turns):
                await asyncio.sleep(0)
            if not waiting.cancel() and not waiting.exception():
                waiting.result().settle(Amount())
            await asyncio.gather(waiting, return_exceptions=True)
        elif permits:
            permit, held = permits.pop(0)
            came_to = {"requests": 1, "tokens": held // 2} if move == "end" else {}
            permit.settle(Amount(**came_to))
            spent.update(came_to)
            reserved.subtract({"requests": 1, "tokens": held})
        assert len(permits) <= 12
        await check(accounts, routers, spent + reserved)


async def still(routers: list[Quotas]) -> None:
    """End what waits for the machine's clock, which is none of the story's, and let what is being told be told."""
    for router in routers:
        if router._soon is not None:
            router._soon.cancel()
            router._soon = None
        while router._renewal is not None:
            await asyncio.shield(router._renewal)


async def check(accounts: FakeAccounts, routers: list[Quotas], used: Counter[str]) -> None:
    """Who has just been told says what is left of the whole limit, less what the other holds and has no use for."""
    bounds = bounds_of(LIMITS)
    for router, other in (routers, routers[::-1]):
        (await router.reserve(TENANT, Amount())).settle(Amount())  # who asks for nothing has nothing to tell
        await still(routers)
        await router.renew()
        loan, account = accounts.lending._loans.get((other._router_id, "acme")), other._accounts.get("acme")
        for name, meter in (("requests", Meter.REQUESTS), ("tokens", Meter.TOKENS)):
            spare = 0 if loan is None or account is None else loan.granted[meter] - account.leased._used[meter]
            assert used[name] <= bounds[meter]
            assert remaining(router)[name] == bounds[meter] - used[name] - spare
