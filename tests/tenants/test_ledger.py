"""The ledger: every row once, and every token that replicas counted in a row or unattributed, at any moment."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import create_engine, delete, select

from serve_app.core.ledger import OTHER_MIXES, SUMS, UNATTRIBUTED, Counted, Price, Prices, Row, Spent, UsageQuestion
from serve_app.tenants import tables
from serve_app.tenants.ledger import MAX_MIXES, MAX_ROWS, LedgerStore, prune

DAY_S = 86_400.0
SPENT = ("prompt_tokens", "cached_tokens", "completion_tokens", "engine_ns")


@pytest.fixture
def store(url: str) -> Iterator[LedgerStore]:
    engine = create_engine(url)
    yield LedgerStore(engine)
    engine.dispose()


def row(id_: str, *, tenant: str = "acme", tokens: int = 10, at: float = 0.0, **more: object) -> Row:
    made = Row(id=id_, tenant=tenant, key_id="key-1", request_id=f"r{id_}", model="tiny", at=at)
    return replace(made, prompt_tokens=tokens, cached_tokens=1, completion_tokens=2 * tokens, engine_ns=7, **more)


def counted(replica: str, spent: Spent) -> Counted:
    return Counted(replica_id=replica, model="tiny", spent=spent)


def sums(store: LedgerStore, **by: str) -> dict[str, int]:
    """Of everything, or of what matches."""
    total: Counter[str] = Counter()
    for line in store.usage(UsageQuestion(by=("tenant", "model", "adapter", "key_id", "day"))):
        if all(line.by[name] == value for name, value in by.items()):
            total.update(line.sums)
    return {name: total[name] for name in SUMS}


@pytest.mark.law("Exactly once")
def test_a_row_that_comes_again_is_kept_once(store: LedgerStore) -> None:
    rows = [row("a"), row("b", cost=5)]
    assert store.record(rows, (), 0.0) == 2
    assert store.record([*rows, row("c")], (), 0.0) == 1
    assert store.record([row("c"), row("c")], (), 0.0) == 0
    assert (sums(store)["requests"], sums(store)["prompt_tokens"], sums(store)["cost"]) == (3, 30, 5)


@pytest.mark.law("Exactly once")
def test_of_two_writers_none_counts_what_the_other_has_counted(store: LedgerStore, url: str) -> None:
    """Accounts that were given up may still write where others began, as on a host that is cut off from the head."""
    other = create_engine(url)

    def write(writer: LedgerStore) -> None:
        for number in range(1, 31):
            writer.record((), [counted("r0", Spent(flow="acme", completion_tokens=number, engine_ns=number))], 0.0)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, [store, LedgerStore(other)]))
    other.dispose()
    assert sums(store)["completion_tokens"] == 30


def test_a_row_that_tells_more_takes_the_place_of_the_other_and_stays_on_its_day(store: LedgerStore) -> None:
    whole = row("a", tokens=30, at=DAY_S + 1, cost=9, status=200)
    assert store.record([row("a", at=DAY_S - 1, cost=3, status=499), row("b")], (), 0.0) == 2
    assert store.record([whole, row("a", tokens=20, at=DAY_S), row("c")], (), DAY_S) == 1
    assert store.record([row("a", tokens=20, at=DAY_S)], (), DAY_S) == 0
    assert store.record([whole], (), DAY_S) == 0
    assert (sums(store)["requests"], sums(store)["completion_tokens"], sums(store)["cost"]) == (3, 100, 9)
    with store.engine.connect() as connection:
        kept = connection.execute(select(tables.rows)).mappings().all()
    for name in ("completion_tokens", "cost"):
        by_day = {day: sums(store, day=day)[name] for day in {each["day"] for each in kept}}
        assert by_day == {day: sum(each[name] for each in kept if each["day"] == day) for day in by_day}
    assert [(each["status"], each["at"]) for each in kept if each["id"] == "a"] == [(200, DAY_S - 1)]


def test_a_row_that_no_database_could_hold_keeps_nothing_else_out(store: LedgerStore) -> None:
    """A mix of many adapters has a name without end, and a price may have been mistyped."""
    mix = "+".join(f"adapter-{number}*0.{number:020}" for number in range(40))
    odd = [row("long", adapter=mix, request_id="r" * 500), row("dear", cost=2**70)]
    assert store.record([row("a"), *odd, row("b")], (), 0.0) == 4
    assert store.record([row("c"), *odd], (), 0.0) == 1
    assert sums(store)["requests"] == 5
    assert sums(store)["prompt_tokens"] == 50
    assert sums(store, adapter=mix[:512])["requests"] == 1


def test_lines_of_a_day_do_not_grow_with_what_a_client_mixes_and_their_sums_are_exact(store: LedgerStore) -> None:
    rows = [row(f"{number}", adapter=f"pirate*{number / 1000}+poet*0.5", cost=number) for number in range(400)]
    plain = [row(f"plain {number}", adapter=f"adapter-{number}", cost=1) for number in range(100)]
    for first in range(0, 400, 100):
        assert store.record([*rows[first : first + 100], *plain[first : first + 25]], (), 0.0) >= 100
    assert store.record([*rows, *plain], (), 0.0) == 75, "known rows are known by their ids, whatever line they are in"
    store.record([replace(rows[3], id="again"), replace(rows[399], id="late", at=DAY_S)], (), 0.0)
    lines = store.usage(UsageQuestion(by=("adapter", "day")))
    mixes = [line for line in lines if "*" in line.by["adapter"] and line.by["day"] == "1970-01-01"]
    assert len(mixes) == MAX_MIXES + 1
    assert len(lines) == MAX_MIXES + 1 + 100 + 1
    assert sums(store, adapter=rows[3].adapter)["requests"] == 2
    assert sums(store, adapter=OTHER_MIXES)["requests"] == 400 - MAX_MIXES
    assert sums(store)["cost"] == sum(range(400)) + 100 + 3 + 399
    assert sums(store)["prompt_tokens"] == 10 * 502
    assert store.cost_of("acme", "1970-01") == sums(store)["cost"]


@pytest.mark.parametrize("odd", [{"request_id": "a half \ud800"}, {"key_id": "nul\0"}, {"choices": 2**40}])
def test_a_row_that_the_store_refuses_holds_up_no_other(
    store: LedgerStore, odd: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    rows = [row(str(number)) for number in range(9)]
    rows[5] = replace(rows[5], **odd)
    spent = Spent(flow="acme", prompt_tokens=90, cached_tokens=9, completion_tokens=180, engine_ns=63)
    new = store.record(rows, [counted("r0", spent)], 0.0)
    assert new in (8, 9), "SQLite keeps nearly everything"
    assert {name: sums(store)[name] for name in SPENT} == {name: getattr(spent, name) for name in SPENT}
    assert sums(store, key_id=UNATTRIBUTED)["prompt_tokens"] == 90 - 10 * new
    assert store.record([*rows, row("more")], (), 0.0) == 1
    assert sum("refuses" in record.getMessage() for record in caplog.records) == 2 * (9 - new)
    assert not any("half" in record.getMessage() for record in caplog.records)


def test_a_refused_row_among_more_than_a_statement_holds_is_the_only_one_that_is_missing(store: LedgerStore) -> None:
    num_rows = 2 * MAX_ROWS + 7
    rows = [row(str(number)) for number in range(num_rows)]
    rows[MAX_ROWS + 1] = replace(rows[MAX_ROWS + 1], request_id="a half \ud800")
    assert store.record(rows, (), 0.0) == num_rows - 1
    assert sums(store)["requests"] == num_rows - 1
    assert store.record(rows, (), 0.0) == 0


def test_what_no_row_explains_is_unattributed_until_one_does(store: LedgerStore) -> None:
    spent = Spent(flow="acme", prompt_tokens=25, cached_tokens=3, completion_tokens=44, engine_ns=100)
    store.record((), [counted("r0", spent)], 0.0)
    assert sums(store, key_id=UNATTRIBUTED)["prompt_tokens"] == 25
    store.record([row("a", at=DAY_S)], (), DAY_S)  # on the next day
    assert sums(store, key_id=UNATTRIBUTED)["prompt_tokens"] == 15
    assert {name: sums(store)[name] for name in SPENT} == {name: getattr(spent, name) for name in SPENT}
    assert sums(store, key_id=UNATTRIBUTED)["requests"] == 0


def test_what_no_row_explains_costs_what_its_tokens_do_as_long_as_none_does(store: LedgerStore) -> None:
    prices = Prices(by_model={"tiny": Price(prompt=1.0, cached=0.5, completion=2.0), "tiny:pirate": Price(prompt=9.0)})
    spent = Spent(flow="acme", prompt_tokens=25, cached_tokens=3, completion_tokens=44, engine_ns=100)
    store.record((), [counted("r0", spent)], 0.0)
    assert store.cost_of("acme", "1970-01-01") == 0, "nobody knows the prices yet"
    store.record((), [counted("r0", replace(spent, engine_ns=200))], 0.0, prices=prices)
    assert store.cost_of("acme", "1970-01-01") == 22 * 1000 + 3 * 500 + 44 * 2000
    explained = row("a", at=DAY_S, adapter="pirate", cost=7)  # of 10, 1 and 20 tokens
    store.record([explained], (), DAY_S, prices=prices)
    assert sums(store, key_id=UNATTRIBUTED)["cost"] == 13 * 1000 + 2 * 500 + 24 * 2000
    rest = replace(row("b", at=DAY_S), prompt_tokens=15, cached_tokens=2, completion_tokens=24)
    store.record([rest], (), DAY_S, prices=prices)
    assert (sums(store, key_id=UNATTRIBUTED)["cost"], sums(store)["cost"]) == (0, 7)


@pytest.mark.law("Exactly once")
@pytest.mark.parametrize("seed", range(5))
def test_rows_and_what_is_unattributed_come_to_what_was_counted(store: LedgerStore, seed: int) -> None:
    """Rows come late, twice or never; counters of replicas that end come in any order."""
    drawn = random.Random(seed)
    truth: dict[tuple[str, str], Spent] = {}
    waiting: list[Row] = []
    for number in range(60):
        tenant, replica = drawn.choice(["acme", "beta"]), f"r{drawn.randrange(3)}"
        before = truth.get((replica, tenant), Spent(flow=tenant))
        made = row(str(number), tenant=tenant, tokens=drawn.randint(1, 50), at=number * DAY_S / 8)
        lost = drawn.randint(0, 5)
        truth[replica, tenant] = Spent(
            flow=tenant,
            prompt_tokens=before.prompt_tokens + made.prompt_tokens + lost,
            cached_tokens=before.cached_tokens + made.cached_tokens,
            completion_tokens=before.completion_tokens + made.completion_tokens + lost,
            engine_ns=before.engine_ns + made.engine_ns + lost,
        )
        if drawn.random() < 0.8:
            waiting.append(made)
        if drawn.random() < 0.5:
            told = [counted(each, spent) for (each, _), spent in truth.items()]
            batch = [each for each in waiting if drawn.random() < 0.7]
            store.record(batch, told, number * DAY_S / 8)
            if drawn.random() < 0.5:
                store.record(batch, told[:1], number * DAY_S / 8)
            waiting = [each for each in waiting if each not in batch]
            for tenant_told in ("acme", "beta"):
                expected = [spent for (_, flow), spent in truth.items() if flow == tenant_told]
                found = sums(store, tenant=tenant_told)
                assert {name: found[name] for name in SPENT} == {
                    name: sum(getattr(each, name) for each in expected) for name in SPENT
                }


def test_counters_that_are_told_late_take_nothing_back(store: LedgerStore) -> None:
    later, earlier = Spent(flow="acme", prompt_tokens=9), Spent(flow="acme", prompt_tokens=4)
    store.record((), [counted("r0", later)], 0.0)
    store.record((), [counted("r0", earlier)], 0.0)
    assert sums(store)["prompt_tokens"] == 9


def test_usage_is_of_the_days_and_the_tenant_that_are_asked_for(store: LedgerStore) -> None:
    store.record([row(str(n), tenant=t, at=n * DAY_S, cost=n) for n, t in enumerate("aabb")], (), 0.0)
    asked = UsageQuestion(by=("tenant", "day"), since="1970-01-02", until="1970-01-03")
    found = [(dict(line.by), line.sums["requests"], line.sums["cost"]) for line in store.usage(asked)]
    assert found == [({"tenant": "a", "day": "1970-01-02"}, 1, 1), ({"tenant": "b", "day": "1970-01-03"}, 1, 2)]
    assert [line.sums["requests"] for line in store.usage(UsageQuestion(by=("model",), tenant="a"))] == [2]
    assert (store.cost_of("b", "1970-01"), store.cost_of("b", "1970-01-04"), store.cost_of("a", "1971")) == (5, 3, 0)


def test_a_price_is_that_of_the_adapter_of_its_base_or_of_all() -> None:
    prices = Prices(by_model={"tiny": Price(prompt=0.15, cached=0.03, completion=0.6), "*": Price(prompt=1.0)})
    assert prices.of("tiny", "pirate").cost(prompt_tokens=10, cached_tokens=4, completion_tokens=5) == (
        6 * 150 + 4 * 30 + 5 * 600
    )
    assert prices.of("other").cost(prompt_tokens=3, cached_tokens=1, completion_tokens=9) == 3000
    own = Prices(by_model={"tiny": Price(prompt=1.0), "tiny:pirate": Price(prompt=2.0)})
    assert own.of("tiny", "pirate").prompt == 2.0
    assert Prices().of("tiny").cost(prompt_tokens=3, cached_tokens=1, completion_tokens=9) == 0


def test_old_rows_go_and_their_sums_stay(store: LedgerStore) -> None:
    rows = [row(f"{day}.{number}", at=day * DAY_S, cost=3) for day in range(6) for number in range(4)]
    store.record(rows, [counted("r0", Spent(flow="acme", prompt_tokens=500))], 5 * DAY_S)
    before = sums(store)
    assert prune(store.engine, now=5.5 * DAY_S, days=2) == 3 * 4  # those of the days 0, 1 and 2
    assert prune(store.engine, now=5.5 * DAY_S, days=2) == 0
    assert sums(store) == before
    assert store.record([rows[-1]], (), 5 * DAY_S) == 0, "what is left is still known"
    assert store.cost_of("acme", "1970-01-01") == 12


def test_more_rows_than_one_transaction_takes_go_too(store: LedgerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.tenants.ledger.BATCH", 7)
    store.record([row(str(number)) for number in range(40)], (), 0.0)
    assert prune(store.engine, now=10 * DAY_S, days=1) == 40


def counts_kept(store: LedgerStore) -> list[str]:
    with store.engine.connect() as connection:
        return sorted(connection.execute(select(tables.counted.c.replica_id)).scalars())


def test_what_replicas_counted_that_are_long_gone_is_in_the_sums_alone(store: LedgerStore) -> None:
    def tell(day: float, **tokens: int) -> None:
        told = [counted(name, Spent(flow="acme", prompt_tokens=number)) for name, number in tokens.items()]
        store.record((), told, day * DAY_S)

    tell(0, gone=500, still=40, busy=3)
    tell(4, still=40)
    tell(5, busy=5)
    prune(store.engine, now=5.5 * DAY_S, days=2)
    assert (counts_kept(store), sums(store)["prompt_tokens"]) == (["busy", "still"], 545)
    tell(6, gone=500)
    assert sums(store)["prompt_tokens"] == 545, "nothing is counted twice"
    tell(6, gone=510, still=41)
    assert sums(store)["prompt_tokens"] == 556


def test_counts_of_a_store_that_kept_no_days_go_when_they_are_old_from_now_on(store: LedgerStore) -> None:
    store.record((), [counted("r0", Spent(flow="acme", prompt_tokens=5))], 0.0)
    with store.engine.begin() as connection:
        connection.execute(delete(tables.replicas))
    kept = []
    for day in (50, 51, 53):
        prune(store.engine, now=day * DAY_S, days=2)
        kept.append(counts_kept(store))
    assert (kept, sums(store)["prompt_tokens"]) == ([["r0"], ["r0"], []], 5)


def test_a_report_without_an_end_has_everything(store: LedgerStore) -> None:
    store.record([row("a"), row("b", at=400 * DAY_S)], (), 0.0)
    question = UsageQuestion(by=("day",))
    assert [line.by["day"] for line in store.usage(question)] == ["1970-01-01", "1971-02-05"]
    assert len(store.usage(replace(question, until="1970-12-31"))) == 1
