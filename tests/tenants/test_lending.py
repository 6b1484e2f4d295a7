"""Leases of limits: whatever routers do, and whichever is cut off, no limit is exceeded by more than a lease."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest

from serve_app.core.tenants import BUDGETS, GAUGES, NANO, Amount, Limits, Meter, Statement, bounds_of
from serve_app.tenants.leased_limits import SHARE, LeasedLimits
from serve_app.tenants.lending import KEPT_S, LEASE_S, Lending

LIMITS = Limits(
    requests_per_minute=60,
    tokens_per_minute=4000,
    max_in_flight=12,
    max_in_flight_tokens=1500,
    budget_per_day=3e-5,
)
DAY_S = 86_400.0
BOUNDS = bounds_of(LIMITS)
LEASES = {meter: -(-bound // SHARE) for meter, bound in BOUNDS.items()}


@dataclass(slots=True)
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class FakeRouter:
    """One router as it uses its leased. is_cut: it cannot reach the lender"""

    name: str
    lending: Lending
    clock: Clock
    leased: LeasedLimits = field(default_factory=LeasedLimits)
    open: list[dict[Meter, int]] = field(default_factory=list)
    is_cut: bool = False

    def renew(self, waiting: dict[Meter, int] | None = None) -> None:
        statement = self.leased.statement("acme", BOUNDS, waiting or {}, now=self.clock())
        if not self.is_cut:
            self.leased.accept(self.lending.renew(self.name, statement), self.clock())

    def begin(self, amount: Amount) -> bool:
        need = dict(amount.over(BOUNDS))
        if not self.leased.take(need, self.clock()):
            self.renew(need)
            if not self.leased.take(need, self.clock()):
                return False
        self.open.append(need)
        return True

    def end(self, place: int, share: float) -> dict[Meter, int]:
        """Returns what was spent of it."""
        reserved = self.open.pop(place)
        spent = {meter: 0 if meter in GAUGES else int(amount * share) for meter, amount in reserved.items()}
        self.leased.settle(reserved, {meter: amount - spent[meter] for meter, amount in reserved.items()})
        return spent


@pytest.mark.law("Limits")
@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_two_routers_never_exceed_a_limit_by_more_than_a_lease(seed: int, cuts: bool) -> None:
    drawn, clock = random.Random(seed), Clock()
    lending = Lending(lambda tenant: LIMITS, clock=clock, wall=clock)
    routers = [FakeRouter(f"router-{i}", lending, clock) for i in range(2)]
    used: dict[Meter, list[tuple[float, int]]] = defaultdict(list)
    begun: dict[int, tuple[float, dict[Meter, int]]] = {}
    was_cut = False
    for _ in range(1500):
        for _ in range(drawn.choice([0, 0, 0, 1, 5])):
            clock.now += 0.4
            for each in routers:
                each.renew()  # as routers do by themselves
        router = drawn.choice(routers)
        if cuts and drawn.random() < 0.01:
            router.is_cut, was_cut = not router.is_cut, True
        match drawn.randrange(4):
            case 0 | 1:
                if router.begin(Amount(requests=1, tokens=drawn.randint(1, 300), cost=drawn.randint(0, 300))):
                    begun[id(router.open[-1])] = (clock.now, router.open[-1])
            case 2 if router.open:
                place = drawn.randrange(len(router.open))
                at, _ = begun.pop(id(router.open[place]))
                for meter, amount in router.end(place, drawn.random()).items():
                    used[meter].append((at, amount))
            case 3:
                router.renew()
        in_use = {each.name: sum((Counter(need) for need in each.open), Counter[Meter]()) for each in routers}
        for meter, bound in BOUNDS.items():
            if meter in GAUGES:  # what a router in use has that is gone is lent again
                of_others = sorted(each[meter] for each in in_use.values())[:1] if was_cut else [0]
                assert sum(each[meter] for each in in_use.values()) <= bound + sum(of_others) + LEASES[meter] * was_cut
            elif meter in BUDGETS:
                assert sum(amount for _, amount in used[meter]) <= bound
            else:
                assert sum(amount for at, amount in used[meter] if clock.now - 60 < at) <= bound + LEASES[meter]


def test_a_lender_that_begins_anew_goes_on_with_the_minute_of_the_routers_it_hears_of() -> None:
    clock = Clock()
    router = FakeRouter("a", Lending(lambda tenant: LIMITS, clock=clock, wall=clock), clock)

    def asked(count: int) -> int:
        num_served = 0
        for _ in range(count):
            if router.begin(Amount(requests=1)):
                router.end(0, 1.0)
                num_served += 1
        return num_served

    assert asked(40) == 40
    clock.now += 20
    router.lending = Lending(lambda tenant: LIMITS, clock=clock, wall=clock)
    assert asked(60) == 20, "no minute has more than the limit"
    clock.now += LEASE_S + 1  # it had nothing to say for so long
    assert asked(1) == router.lending.free("acme")[Meter.REQUESTS] == 0
    clock.now += 62
    assert asked(70) == 60, "what was counted was counted once"


def test_what_one_router_holds_and_does_not_use_comes_to_the_other() -> None:
    clock = Clock()
    lending = Lending(lambda tenant: LIMITS, clock=clock, wall=clock)
    first, second = (FakeRouter(name, lending, clock) for name in ("a", "b"))
    assert all(first.begin(Amount(requests=1)) for _ in range(12))
    assert not second.begin(Amount(requests=1))
    for _ in range(12):
        first.end(0, 0.0)
    first.renew()  # keeps a lease, as it was in demand
    first.renew()
    assert all(second.begin(Amount(requests=1)) for _ in range(12))


def test_what_a_router_that_is_gone_had_in_flight_is_lent_again_when_its_lease_is_over() -> None:
    clock = Clock()
    lending = Lending(lambda tenant: LIMITS, clock=clock, wall=clock)
    first, second = (FakeRouter(name, lending, clock) for name in ("a", "b"))
    assert all(first.begin(Amount(requests=1)) for _ in range(12))
    clock.now += LEASE_S - 0.1
    assert not second.begin(Amount(requests=1))
    clock.now += 0.1
    assert second.begin(Amount(requests=1))


def test_a_router_that_is_cut_off_serves_from_what_it_holds_and_then_refuses() -> None:
    clock = Clock()
    router = FakeRouter("a", Lending(lambda tenant: LIMITS, clock=clock, wall=clock), clock)
    assert router.begin(Amount(requests=1, tokens=10))
    router.renew()
    router.is_cut = True
    assert router.leased.take({Meter.REQUESTS: 1}, clock())
    clock.now += LEASE_S
    assert not router.leased.take({Meter.REQUESTS: 1}, clock())


def test_a_statement_that_is_told_twice_changes_nothing_the_second_time() -> None:
    clock = Clock()
    lending = Lending(lambda tenant: LIMITS, clock=clock, wall=clock)
    router = FakeRouter("a", lending, clock)
    router.begin(Amount(requests=1, tokens=100))
    statement = router.leased.statement("acme", BOUNDS, {}, now=clock())
    first = lending.renew("a", statement)
    before = lending.free("acme")
    assert lending.renew("a", statement) == first
    assert lending.free("acme") == before


@pytest.mark.law("Limits")
@pytest.mark.parametrize("seed", range(20))
def test_what_is_said_to_remain_is_what_the_meters_hold(seed: int) -> None:
    drawn, clock = random.Random(seed), Clock()
    lending = Lending(lambda tenant: LIMITS, clock=clock, wall=clock)
    router, spent = FakeRouter("a", lending, clock), Counter[Meter]()
    for _ in range(60):
        router.begin(Amount(requests=1, tokens=drawn.randint(1, 200)))
        if router.open and drawn.random() < 0.7:
            spent.update(router.end(drawn.randrange(len(router.open)), drawn.random()))
        reserved = Counter({meter: sum(need[meter] for need in router.open) for meter in BOUNDS})
        for meter in (Meter.REQUESTS, Meter.TOKENS):
            assert router.leased.remaining(meter) == BOUNDS[meter] - spent[meter] - reserved[meter]


def test_a_budget_goes_on_with_what_the_ledger_says_was_spent() -> None:
    clock = Clock()
    asked = []

    def spent(tenant: str, period: str) -> int:
        asked.append((tenant, period))
        return 2 * NANO

    lending = Lending(lambda tenant: Limits(budget_per_day=3.0), clock=clock, wall=clock, spent_of=spent)
    assert lending.free("acme") == {Meter.DAY: NANO}
    assert (lending.free("acme"), asked) == ({Meter.DAY: NANO}, [("acme", "1970-01-01")])


def test_a_budget_counts_today_after_a_clock_was_ahead() -> None:
    clock, wall, asked = Clock(), Clock(0.5 * DAY_S), []

    def spent(tenant: str, period: str) -> int:
        asked.append(period)
        return 2 * NANO if period == "1970-01-02" else 0

    lending = Lending(lambda tenant: Limits(budget_per_day=3.0), clock=clock, wall=wall, spent_of=spent)
    statement = Statement(tenant="acme", used={Meter.DAY: 0}, wanted={Meter.DAY: 3 * NANO})
    wall.now = 400 * DAY_S
    assert lending.renew("a", statement).granted == {Meter.DAY: 3 * NANO}
    assert lending.free("acme") == {Meter.DAY: 0}
    wall.now = 0.6 * DAY_S
    assert lending.free("acme") == {Meter.DAY: 3 * NANO}, "nothing was spent today"
    wall.now = 1.5 * DAY_S
    assert lending.free("acme") == {Meter.DAY: NANO}, "the ledger knows of today, whatever the clock said before"
    assert asked == ["1971-02-05", "1970-01-01", "1970-01-02"]


def test_what_was_granted_yesterday_makes_no_room_today() -> None:
    clock, limits = Clock(DAY_S - 10), Limits(budget_per_day=1.0, budget_per_month=5.0)
    lending = Lending(lambda tenant: limits, clock=clock, wall=clock)
    nine, whole = 9 * NANO // 10, dict.fromkeys((Meter.DAY, Meter.MONTH), NANO)
    wanted = dict.fromkeys((Meter.DAY, Meter.MONTH), nine)
    nothing = dict.fromkeys((Meter.DAY, Meter.MONTH), 0)
    lending.renew("a", Statement(tenant="acme", used=nothing, wanted=wanted))
    clock.now += 20
    lending.renew("a", Statement(tenant="acme", used=wanted, wanted=nothing))
    assert lending.renew("b", Statement(tenant="acme", used=nothing, wanted=whole)).granted == whole
    lending.renew("a", Statement(tenant="acme", used=nothing, wanted=nothing))
    assert lending.free("acme") == {Meter.DAY: 0, Meter.MONTH: 4 * NANO}, "the month is still the same"


def test_what_a_router_was_granted_is_known_when_it_comes_back_and_is_no_more_than_that() -> None:
    clock, limits = Clock(), Limits(budget_per_day=1.0)
    lending = Lending(lambda tenant: limits, clock=clock, wall=clock)
    for used, wanted, away_s, free in ((0, 6, 0, 4), (6, 0, LEASE_S, 4), (2, 0, KEPT_S + 2 * LEASE_S, 8), (0, 0, 0, 8)):
        unit = NANO // 10
        lending.renew("a", Statement(tenant="acme", used={Meter.DAY: used * unit}, wanted={Meter.DAY: wanted * unit}))
        assert lending.free("acme") == {Meter.DAY: free * unit}
        clock.now += away_s


def test_routers_that_are_gone_are_forgotten() -> None:
    clock = Clock()
    lending = Lending(lambda tenant: LIMITS, clock=clock, wall=clock)
    for number in range(100):
        lending.renew(f"router-{number}", Statement(tenant="acme", used={}, wanted={}))
        clock.now += KEPT_S / 10
    assert len(lending._loans) + len(lending._lapsed) <= 13


def test_what_was_told_in_time_is_not_asked_for() -> None:
    clock = Clock()

    def spent(tenant: str, period: str) -> int:
        raise AssertionError

    limits = Limits(budget_per_day=3.0, budget_per_month=5.0, max_in_flight=3)
    lending = Lending(lambda tenant: limits, clock=clock, wall=clock, spent_of=spent)
    assert lending.unread("acme") == [(Meter.DAY, "1970-01-01"), (Meter.MONTH, "1970-01")]
    for period in lending.unread("acme"):
        lending.tell("acme", period, NANO)
        lending.tell("acme", period, 3 * NANO)  # late, and no more believed
    assert lending.unread("acme") == []
    assert lending.free("acme") == {Meter.IN_FLIGHT: 3, Meter.DAY: 2 * NANO, Meter.MONTH: 4 * NANO}
    clock.now += DAY_S
    assert lending.free("acme")[Meter.DAY] == 3 * NANO, "a new day needs nobody"


def test_a_limit_that_is_changed_holds_from_the_next_renewal_on() -> None:
    clock, limits = Clock(), [Limits(max_in_flight=1)]
    lending = Lending(lambda tenant: limits[0], clock=clock, wall=clock)
    leased = LeasedLimits()

    def renew() -> int:
        bounds = bounds_of(limits[0])
        statement = leased.statement("acme", bounds, dict.fromkeys(bounds, 5), now=clock())
        leased.accept(lending.renew("a", statement), clock())
        return sum(leased.take({Meter.IN_FLIGHT: 1}, clock()) for _ in range(5))

    assert renew() == 1
    limits[0] = Limits(max_in_flight=4)
    assert renew() == 3
