"""Limits at a router: 200 at once, two routers, refusals without asking, and a lender that is gone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from serve_app.core.errors import InvalidRequest, OutOfBudget, QuotaExceeded, Unavailable
from serve_app.core.tenants import Amount, Lease, Limits, Meter, Statement, Tenant, bounds_of
from serve_app.router.appointments import OBEYED_S
from serve_app.router.quotas import AGAIN_S, Permit, Quotas
from serve_app.tenants.leased_limits import NEVER_TOLD
from serve_app.tenants.lending import Lending

LIMITED = Limits(budget_per_day=1.0, requests_per_minute=10)


@dataclass(slots=True)
class FakeAccounts:
    """Lends at once. num_calls: counted;  is_gone: it cannot be reached;  is_slow: it knows nothing yet"""

    limits: Limits
    now: float = 1000.0
    num_calls: int = 0
    is_gone: bool = False
    is_slow: bool = False
    lending: Lending = field(init=False)

    def __post_init__(self) -> None:
        self.lending = Lending(lambda tenant: self.limits, clock=self.clock, wall=self.clock)

    def clock(self) -> float:
        return self.now

    async def renew(self, router_id: str, statements: Sequence[Statement]) -> Sequence[Lease]:
        self.num_calls += 1
        await asyncio.sleep(0)
        if self.is_gone:
            raise ConnectionError("accounts are gone")
        return [NEVER_TOLD if self.is_slow else self.lending.renew(router_id, each) for each in statements]


def quotas(accounts: FakeAccounts, name: str = "a") -> Quotas:
    return Quotas(name, accounts, clock=accounts.clock)


async def asked(quotas: Quotas, tenant: Tenant, amount: Amount, count: int) -> tuple[list[Permit], list[QuotaExceeded]]:
    found = await asyncio.gather(*(quotas.reserve(tenant, amount) for _ in range(count)), return_exceptions=True)
    refused = [each for each in found if isinstance(each, QuotaExceeded)]
    permits = [each for each in found if isinstance(each, Permit)]
    assert len(refused) + len(permits) == count, found
    return permits, refused


@pytest.mark.law("Limits")
@pytest.mark.parametrize(
    ("limits", "allowed"),
    [
        (Limits(requests_per_minute=50), 50),
        (Limits(tokens_per_minute=1000), 100),
        (Limits(max_in_flight=7), 7),
        (Limits(max_in_flight_tokens=95), 9),
        (Limits(budget_per_day=4e-8), 40),
        (Limits(requests_per_minute=150, max_in_flight=60, tokens_per_minute=700), 70 - 10),
    ],
)
async def test_200_at_once_against_two_routers_never_exceed_a_limit(limits: Limits, allowed: int) -> None:
    accounts, tenant = FakeAccounts(limits), Tenant(name="acme", limits=limits)
    amount = Amount(requests=1, tokens=10, cost=1)
    routers = [quotas(accounts, name) for name in ("a", "b")]
    found = await asyncio.gather(*(asked(each, tenant, amount, 100) for each in routers))
    permits = [permit for mine, _ in found for permit in mine]
    assert len(permits) <= allowed
    more, _ = await asked(routers[0], tenant, amount, 200)
    again, _ = await asked(routers[1], tenant, amount, 200)
    assert allowed * 7 // 8 - 1 <= len([*permits, *more, *again]) <= allowed


async def test_what_is_cancelled_or_fails_is_given_back_and_what_was_spent_is_not() -> None:
    limits = Limits(tokens_per_minute=100, max_in_flight=3, requests_per_minute=10)
    accounts, tenant = FakeAccounts(limits), Tenant(name="acme", limits=limits)
    router = quotas(accounts)
    permits, _ = await asked(router, tenant, Amount(requests=1, tokens=30), 3)
    permits[0].settle(Amount())
    permits[0].settle(Amount())  # once is enough
    permits[1].settle(Amount(requests=1, tokens=12))
    permits[2].settle(Amount(requests=1, tokens=30))
    await router.renew()
    await router.renew()
    rates = router.rates(tenant)
    assert {meter: rate.remaining for meter, rate in rates.items()} == {Meter.REQUESTS: 8, Meter.TOKENS: 58}
    assert accounts.lending.free("acme")[Meter.IN_FLIGHT] == 3


async def test_whoever_stops_waiting_leaves_nothing_reserved() -> None:
    limits = Limits(max_in_flight=5)
    accounts, tenant = FakeAccounts(limits), Tenant(name="acme", limits=limits)
    router = quotas(accounts)
    for num_turns in range(6):
        waiting = asyncio.create_task(router.reserve(tenant, Amount(requests=1)))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if waiting.cancel():
            await asyncio.gather(waiting, return_exceptions=True)
        else:
            (await waiting).settle(Amount())
    permits, refused = await asked(router, tenant, Amount(requests=1), 6)
    assert (len(permits), len(refused)) == (5, 1)


async def test_refusals_do_not_ask_the_lender_again_and_again() -> None:
    limits = Limits(requests_per_minute=5)
    accounts, tenant = FakeAccounts(limits), Tenant(name="acme", limits=limits)
    router = quotas(accounts)
    await asked(router, tenant, Amount(requests=1), 6)
    before = accounts.num_calls
    _, refused = await asked(router, tenant, Amount(requests=1), 500)
    assert (len(refused), accounts.num_calls) == (500, before)


async def test_requests_that_wait_are_asked_for_together() -> None:
    limits = Limits(max_in_flight=300)
    accounts, tenant = FakeAccounts(limits), Tenant(name="acme", limits=limits)
    permits, _ = await asked(quotas(accounts), tenant, Amount(requests=1), 200)
    assert (len(permits), accounts.num_calls) == (200, 1)


async def test_a_refusal_says_which_limit_and_when_to_come_again() -> None:
    limits = Limits(requests_per_minute=6)
    accounts, tenant = FakeAccounts(limits), Tenant(name="acme", limits=limits)
    router = quotas(accounts)
    _, refused = await asked(router, tenant, Amount(requests=1), 9)
    assert [each.facts["limit"] for each in refused] == ["requests_per_minute"] * 3
    assert [each.retry_after_s for each in refused] == [60] * 3, "then all of it is there, and no client waits longer"
    accounts.now += 30
    times = [(await asked(router, tenant, Amount(requests=1), 1))[1][0].retry_after_s or 0 for _ in range(9)]
    assert min(times) >= 31, "nobody is told to come in vain"
    assert max(times) > times[0], "not all of them are told to come at once"
    accounts.now += 32
    assert len((await asked(router, tenant, Amount(requests=1), 3))[0]) == 3


async def test_nobody_is_told_to_wait_for_longer_than_clients_obey() -> None:
    limits = Limits(requests_per_minute=6, max_in_flight=3)
    accounts, tenant = FakeAccounts(limits), Tenant(name="acme", limits=limits)
    router = quotas(accounts)
    _, refused = await asked(router, tenant, Amount(requests=1), 500)
    assert {each.facts["limit"] for each in refused} == {"max_in_flight"}
    times = [each.retry_after_s or 0 for each in refused]
    assert max(times) == OBEYED_S
    assert len(set(times[250:])) > 5, "those who are told the longest are spread as well"


async def test_a_budget_that_is_spent_says_so_and_is_there_again_the_next_day() -> None:
    limits = Limits(budget_per_day=1e-6)
    accounts, tenant = FakeAccounts(limits), Tenant(name="acme", limits=limits)
    router = quotas(accounts)
    (await router.reserve(tenant, Amount(cost=1000))).settle(Amount(cost=1000))
    with pytest.raises(OutOfBudget, match="budget_per_day is spent; it begins anew in 85400 s") as refused:
        await router.reserve(tenant, Amount(cost=1))
    assert (refused.value.code, refused.value.retry_after_s) == ("insufficient_quota", 86_400 - 1000)
    accounts.now = 86_400.0
    await router.reserve(tenant, Amount(cost=1000))


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("limits", [Limits(budget_per_day=1e-6), Limits(tokens_per_minute=1000)])
async def test_what_is_only_reserved_is_not_told_as_spent(limits: Limits, elsewhere: bool) -> None:
    """Whoever asks for more than it uses, as most do, would be sent away until midnight, or for a minute."""
    accounts, tenant = FakeAccounts(limits), Tenant(name="acme", limits=limits)
    first, second = quotas(accounts, "a"), quotas(accounts, "b" if elsewhere else "a")
    second = second if elsewhere else first
    running = await first.reserve(tenant, Amount(cost=600, tokens=600))
    with pytest.raises(QuotaExceeded, match="is reserved by requests that still run; retry in") as refused:
        await second.reserve(tenant, Amount(cost=600, tokens=600))
    assert not isinstance(refused.value, OutOfBudget)
    assert (refused.value.retry_after_s or 99) <= 3
    running.settle(Amount(cost=5, tokens=5))
    for router in (first, second):
        await router.renew()
    accounts.now += refused.value.retry_after_s or 0
    (await second.reserve(tenant, Amount(cost=600, tokens=600))).settle(Amount(cost=600, tokens=600))
    for router in (second, first):
        await router.renew()
    with pytest.raises(QuotaExceeded, match=r"has \S+ left, and the request"):
        await first.reserve(tenant, Amount(cost=600, tokens=600))


@pytest.mark.parametrize(
    ("limits", "amount"),
    [
        (Limits(max_in_flight=1), Amount(requests=1)),
        (Limits(max_in_flight_tokens=40), Amount(requests=1, tokens=21)),
        (Limits(tokens_per_minute=3000), Amount(requests=1, tokens=1800)),
        (Limits(budget_per_day=2e-6), Amount(cost=1800)),
        (Limits(requests_per_minute=40), Amount(requests=1)),
    ],
)
async def test_one_request_after_the_other_is_let_in_at_whichever_router(limits: Limits, amount: Amount) -> None:
    """What a router has no more use for comes to the other one, before anybody is refused for it."""
    accounts, tenant = FakeAccounts(limits), Tenant(name="acme", limits=limits)
    routers = [quotas(accounts, name) for name in "ab"]
    renewing = [asyncio.create_task(each.run()) for each in routers]
    drawn = random.Random(7)
    for _ in range(36):
        permit = await drawn.choice(routers).reserve(tenant, amount)
        await asyncio.sleep(0.01)
        accounts.now += 0.01
        permit.settle(Amount(requests=1, tokens=1, cost=1))
    for each in renewing:
        each.cancel()


async def test_four_at_a_time_find_four_places_at_two_routers() -> None:
    limits = Limits(max_in_flight=4)
    accounts, tenant = FakeAccounts(limits), Tenant(name="acme", limits=limits)
    routers = [quotas(accounts, name) for name in "ab"]
    renewing = [asyncio.create_task(each.run()) for each in routers]

    async def client(seed: int) -> None:
        drawn = random.Random(seed)
        for _ in range(12):
            permit = await drawn.choice(routers).reserve(tenant, Amount(requests=1))
            await asyncio.sleep(drawn.uniform(0.005, 0.02))
            permit.settle(Amount(requests=1))

    await asyncio.gather(*map(client, range(4)))
    for each in renewing:
        each.cancel()


async def test_few_wait_for_what_others_may_give_back_and_who_is_too_many_is_told_at_once() -> None:
    limits = Limits(max_in_flight=2)
    accounts, tenant = FakeAccounts(limits), Tenant(name="acme", limits=limits)
    first, second = quotas(accounts, "a"), quotas(accounts, "b")
    _ = [await first.reserve(tenant, Amount(requests=1)) for _ in range(2)]
    with pytest.raises(QuotaExceeded):
        await second.reserve(tenant, Amount(requests=1))
    before = accounts.num_calls
    _, refused = await asked(second, tenant, Amount(requests=1), 1000)
    assert len(refused) == 1000
    assert accounts.num_calls - before <= 3 * len(AGAIN_S)


async def test_a_limit_per_minute_lets_in_who_comes_when_told() -> None:
    """Whatever part of a second it is, and whatever was asked before."""
    for fraction in (0.0, 0.3, 0.9):
        limits = Limits(requests_per_minute=3)
        accounts, tenant = FakeAccounts(limits, now=1000 + fraction), Tenant(name="acme", limits=limits)
        router = quotas(accounts)
        permits, refused = await asked(router, tenant, Amount(requests=1), 4)
        for each in permits:
            each.settle(Amount(requests=1))
        accounts.now += refused[0].retry_after_s or 0
        assert len((await asked(router, tenant, Amount(requests=1), 1))[0]) == 1


async def test_a_refund_is_of_its_own_minute_and_day_and_makes_no_room_in_the_next() -> None:
    limits = Limits(budget_per_day=1e-6, tokens_per_minute=50, max_in_flight=9)
    accounts, tenant = FakeAccounts(limits, now=86_400.0 - 10), Tenant(name="acme", limits=limits)
    first, second = quotas(accounts, "a"), quotas(accounts, "b")
    long = await first.reserve(tenant, Amount(requests=1, tokens=50, cost=900))
    accounts.now += 70
    permits = [await first.reserve(tenant, Amount(requests=1, tokens=25, cost=500))]
    for _ in range(2):
        await first.renew()  # what is in demand no more is given up
    permits.append(await second.reserve(tenant, Amount(requests=1, tokens=25, cost=500)))
    long.settle(Amount())
    for router in (first, second, first, second):
        await router.renew()
    free = accounts.lending.free("acme")
    assert free == {Meter.DAY: 0, Meter.TOKENS: 0, Meter.IN_FLIGHT: 7}
    permits[1].settle(Amount(requests=1, tokens=20, cost=100))
    await second.renew()
    await second.renew()
    free = accounts.lending.free("acme")
    assert free == {Meter.DAY: 400, Meter.TOKENS: 5, Meter.IN_FLIGHT: 8}


async def test_more_than_a_limit_allows_at_all_is_refused_for_good() -> None:
    limits = Limits(tokens_per_minute=100)
    tenant = Tenant(name="acme", limits=limits)
    with pytest.raises(InvalidRequest, match="tokens_per_minute is 100") as refused:
        await quotas(FakeAccounts(limits)).reserve(tenant, Amount(requests=1, tokens=101))
    assert refused.value.retry_after_s is None


async def test_a_budget_that_no_such_request_fits_is_told_as_that_and_not_as_spent() -> None:
    limits = Limits(budget_per_day=0.00002, budget_per_month=1.0)
    tenant = Tenant(name="acme", limits=limits)
    with pytest.raises(InvalidRequest, match=r"budget_per_day is 2e-05, and .* may come to 0\.0001;") as refused:
        await quotas(FakeAccounts(limits)).reserve(tenant, Amount(requests=1, tokens=100, cost=100_000))
    assert refused.value.facts == {"limit": "budget_per_day", "allowed": 0.00002, "wanted": 0.0001}


async def test_a_router_whose_lender_is_gone_serves_what_it_holds_and_then_says_that_it_does_not_know() -> None:
    limits = Limits(requests_per_minute=80)
    accounts, tenant = FakeAccounts(limits), Tenant(name="acme", limits=limits)
    router = quotas(accounts)
    await asked(router, tenant, Amount(requests=1), 20)
    await router.renew()  # what is in demand is held
    accounts.is_gone = True
    permits = [await router.reserve(tenant, Amount(requests=1)) for _ in range(5)]
    assert len(permits) == 5
    accounts.now += 6
    with pytest.raises(Unavailable) as refused:
        await router.reserve(tenant, Amount(requests=1))
    assert refused.value.retry_after_s == 1
    accounts.is_gone = False
    await router.reserve(tenant, Amount(requests=1))


async def test_a_tenant_without_limits_asks_nobody() -> None:
    accounts = FakeAccounts(Limits())
    await asked(quotas(accounts), Tenant(name="free"), Amount(requests=1, tokens=10**9), 10)
    assert (accounts.num_calls, bounds_of(Limits())) == (0, {})


async def test_what_the_lender_does_not_know_yet_is_not_said_to_be_spent() -> None:
    accounts, tenant = FakeAccounts(LIMITED), Tenant(name="acme", limits=LIMITED)
    accounts.is_slow = True
    router = quotas(accounts)
    with pytest.raises(Unavailable):
        await router.reserve(tenant, Amount(requests=1, cost=1))
    accounts.is_slow = False
    assert isinstance(await router.reserve(tenant, Amount(requests=1, cost=1)), Permit)


async def test_after_a_rest_nobody_is_told_to_wait_by_how_long_it_was() -> None:
    limits = Limits(max_in_flight=4)
    accounts, tenant = FakeAccounts(limits), Tenant(name="acme", limits=limits)
    router = quotas(accounts)
    for _ in range(9):
        (await router.reserve(tenant, Amount(requests=1))).settle(Amount(requests=1))
    accounts.now += 3600
    permits, refused = await asked(router, tenant, Amount(requests=1), 5)
    assert len(permits) == 4
    assert (refused[0].retry_after_s or 99) <= 2
    for each in permits:  # one a second from here on
        accounts.now += 1
        each.settle(Amount(requests=1))
    _, refused = await asked(router, tenant, Amount(requests=1), 12)
    assert max(each.retry_after_s or 0 for each in refused) >= 6, "as fast as they ended of late"
