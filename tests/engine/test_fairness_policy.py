"""The policy's parts on anything: keys, counters, what a step divides, and accounts that add up."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.ledger import REST, FlowUsage, Spent, UsageReport
from serve_app.core.shares import Share
from serve_app.engine.scheduler import accounting as accounts_module
from serve_app.engine.scheduler import policy as policy_module
from serve_app.engine.scheduler.accounting import Account, Accounts, attribute
from serve_app.engine.scheduler.policy import LEAST_LUMP, MOST_LUMPS, Claim, FairShares, Key, Rules, divided
from serve_app.engine.scheduler.sequence import Batch, Span
from tests.engine.simulated import Simulation

PRIORITIES = st.sampled_from(["interactive", "standard", "batch"])


class Standing(NamedTuple):
    share: Share
    counter: float
    since: float
    is_kept: bool
    number: int


STANDINGS = st.builds(
    Standing,
    share=st.builds(Share, flow=st.sampled_from("abc"), priority=PRIORITIES),
    counter=st.floats(0, 1e9),
    since=st.floats(-100, 0),
    is_kept=st.booleans(),
    number=st.integers(0, 100),
)


def turn_key(standing: Standing, rules: Rules) -> Key:
    share, counter, since, is_kept, number = standing
    policy = FairShares(rules)
    policy.charge(share, counter)
    return policy.turn_key(share, owed=0.0, since=since, is_kept=is_kept, number=number, now=0.0)


@given(left=STANDINGS, right=STANDINGS)
def test_no_difference_of_service_or_turn_comes_before_age_and_class(left: Standing, right: Standing) -> None:
    rules = Rules()
    ranks = {"interactive": 0, "standard": 1, "batch": 2}
    one, other = turn_key(left, rules), turn_key(right, rules)
    if -left.since > rules.max_wait_s:
        assert right.since < left.since or one <= other or right.number < left.number
    elif -right.since <= rules.max_wait_s and left.since <= right.since:
        if ranks[left.share.priority] < ranks[right.share.priority]:
            aged = ranks[right.share.priority] - int(-right.since / rules.age_s)
            assert one[0] <= other[0] or aged <= 0
        if left.share.priority == right.share.priority and left.counter + rules.quantum < right.counter:
            assert one < other, "a quantum is all that a turn is worth"


@given(
    wanted=st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 1e6), st.sampled_from([0.5, 1.0, 3.0]), st.integers(0, 500)),
        min_size=1,
        max_size=12,
    ),
    amount=st.integers(0, 2000),
    price=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_a_step_is_given_out_whole_and_brings_counters_together(
    wanted: list[tuple[int, float, float, int]], amount: int, price: float
) -> None:
    claims = [
        Claim(key=(rank, counter, number), weight=weight, wanted=tokens)
        for number, (rank, counter, weight, tokens) in enumerate(wanted)
    ]
    lump = max(LEAST_LUMP, amount // MOST_LUMPS)
    given_out = divided(claims, amount, price=price, lump=lump)
    assert sum(given_out) == min(amount, sum(claim.wanted for claim in claims))
    after = []
    for claim, tokens in zip(claims, given_out, strict=True):
        assert 0 <= tokens <= claim.wanted
        after.append(claim.key[1] + tokens * price / claim.weight)
    for claim, tokens, level in zip(claims, given_out, after, strict=True):
        if tokens < claim.wanted:  # who lacks something lacks it because nobody has been raised above it
            for other, others_tokens, others_level in zip(claims, given_out, after, strict=True):
                if others_tokens:
                    assert other.key[0] <= claim.key[0]
                    slack = lump * price / other.weight + 1e-6 * others_level
                    assert other.key[0] < claim.key[0] or others_level <= level + slack


COMMANDS = st.lists(
    st.tuples(st.sampled_from(["enter", "leave", "charge"]), st.sampled_from("abcd"), st.floats(0, 1000)), max_size=60
)


@given(commands=COMMANDS)
def test_counters_never_fall_and_who_begins_to_wait_is_a_quantum_below_somebody_at_most(
    commands: list[tuple[str, str, float]],
) -> None:
    counters, lines = FairShares(), dict.fromkeys("abcd", 0)
    for command, flow, service in commands:
        before = {each: counters.counter_of(each) for each in lines}
        if command == "enter":
            waiting = [before[each] for each in lines if lines[each]]
            counters.enter(Share(flow=flow))
            if not lines[flow] and waiting:
                assert counters.counter_of(flow) == max(before[flow], min(waiting) - counters.rules.quantum)
            lines[flow] += 1
        elif command == "leave" and lines[flow]:
            counters.leave(Share(flow=flow))
            lines[flow] -= 1
        elif command == "charge":
            counters.charge(Share(flow=flow, weight=2.0), service)
            assert counters.counter_of(flow) == pytest.approx(before[flow] + service / 2)
        assert all(counters.counter_of(each) >= before[each] for each in lines)
        assert counters.gap >= 0


def test_flows_that_came_and_went_are_forgotten_and_debts_are_not() -> None:
    counters = FairShares()
    counters.charge(Share(flow="debtor"), 1e9)
    for number in range(5 * policy_module.MAX_KNOWN):
        counters.enter(Share(flow=f"f{number}"))
        counters.charge(Share(flow=f"f{number}"), number % 7)
        counters.leave(Share(flow=f"f{number}"))
    assert len(counters._counters) <= policy_module.MAX_KNOWN + 1
    assert counters.counter_of("debtor") == 1e9


@pytest.mark.law("Accounts")
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 10**9), st.integers(0, 10**9), st.dictionaries(st.sampled_from("abcde"), st.integers(1, 512))
        ),
        max_size=30,
    )
)
def test_attributed_and_idle_time_is_the_elapsed_time_to_the_nanosecond(
    steps: list[tuple[int, int, dict[str, int]]],
) -> None:
    now = 17
    accounts = Accounts(lambda: now)
    policy = FairShares()
    attributed = dict.fromkeys("abcde", 0.0)
    for idle_ns, spent_ns, rows in steps:
        now += idle_ns
        since_ns = now
        now += spent_ns
        if rows:
            assert attribute(batch_of(rows), policy, accounts, since_ns=since_ns) == spent_ns
            for flow, num_rows in rows.items():
                attributed[flow] += spent_ns * num_rows / sum(rows.values())
        report = accounts.report()
        assert report.idle_ns >= 0
        assert report.idle_ns + sum(usage.engine_ns for usage in report.flows) == report.elapsed_ns
    for usage in accounts.report().flows:
        assert usage.engine_ns == pytest.approx(attributed[usage.flow], abs=len(steps) + 1)
        assert policy.counter_of(usage.flow) == usage.service == usage.num_rows


def batch_of(rows: dict[str, int]) -> Batch:
    """A chunk of so many tokens of each flow."""
    simulation = Simulation()
    return Batch(tuple(Span(simulation.ask(Share(flow=each), 600, 1), 0, rows[each], False) for each in rows))


def test_so_many_accounts_are_kept_and_no_token_is_lost() -> None:
    accounts = Accounts()
    for number in range(3 * accounts_module.MAX_FLOWS):
        accounts.note(f"f{number}", Account(completion_tokens=2))
    report = accounts.report()
    assert len(report.flows) == accounts_module.MAX_FLOWS + 1
    assert sum(usage.num_generated for usage in report.flows) == 6 * accounts_module.MAX_FLOWS
    for told in (report.bounded(5), report.bounded(5).bounded(3)):
        assert sum(usage.num_generated for usage in told.flows) == 6 * accounts_module.MAX_FLOWS
        assert len(told.flows) <= 6
        assert [usage.flow for usage in told.flows[:3]] == ["f0", "f1", "f2"]
        assert told.flows[-1].flow == REST
    assert len(accounts.news(0, most=10**6).spent) == 3 * accounts_module.MAX_FLOWS, "the ledger is told of each"
    few = UsageReport(flows=(FlowUsage(flow="a"),))
    assert few.bounded(1) is few


@pytest.mark.law("All time is somebody's")
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 2)), max_size=60), st.integers(1, 4))
def test_a_listener_hears_of_every_change_once_a_few_at_a_time(changes: list[tuple[str, int]], most: int) -> None:
    """It asks now and then, and again where an answer was lost; in the end it knows what there is."""
    accounts, heard, until, num_told = Accounts(lambda: 0), dict[str, Spent](), 0, 0
    for flow, how_often in changes:
        accounts.note(flow, Account(completion_tokens=1))
        for is_lost in (True, False)[2 - how_often :]:
            news = accounts.news(until, most=most)
            assert len(news.spent) <= most
            assert news == accounts.news(until, most=most)
            if not is_lost:
                heard |= {each.flow: each for each in news.spent}
                until, num_told = news.until, num_told + len(news.spent)
    while (news := accounts.news(until, most=most)).spent:
        heard |= {each.flow: each for each in news.spent}
        until, num_told = news.until, num_told + len(news.spent)
    assert {flow: each.completion_tokens for flow, each in heard.items()} == Counter(flow for flow, _ in changes)
    assert num_told <= len(changes)
    assert accounts.num_changes == len(changes)


def test_the_policy_needs_no_torch() -> None:
    names = ("policy", "accounting")
    lines = [f"import serve_app.engine.scheduler.{name}" for name in names]
    found = subprocess.run(
        [sys.executable, "-c", "; ".join([*lines, "import sys; print('torch' in sys.modules)"])],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == "False"


def test_a_share_is_small_on_its_way() -> None:
    """Requests of one call name its class once."""
    shares = [Share(flow=f"tenant-{number}", weight=2.0) for number in range(100)]
    assert len(pickle.dumps(shares, pickle.HIGHEST_PROTOCOL)) < 40 * 100
