"""Whether a ledger agrees with what clients were answered and with what replicas counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
from sqlalchemy import URL, Connection, NullPool, create_engine

from serve_app.core.ledger import UNATTRIBUTED

SPENT = ("prompt_tokens", "cached_tokens", "completion_tokens", "engine_ns")
TOKENS = ("prompt_tokens", "completion_tokens")
"""What a client is told as its usage, in this order."""

BEGIN = {"sqlite": "BEGIN", "postgresql": "BEGIN ISOLATION LEVEL REPEATABLE READ"}
"""All that is read then is of one moment."""

Sums = Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, for one model, as its client knows it and whoever killed routers and replicas.

    name:     its request id
    most:     what one replica may compute for it: tokens of its prompt and of all its completions
    usage:    what its client was told, in the order of TOKENS; None where it got no whole answer of status 200
    repeats:  the name of the request whose answer it was given again; "" where it was answered by itself
    was_taken: whether a replica may have computed it, besides those that died
    num_lost: replicas that died while it ran: each may have computed it in vain
    may_lack_row:     the router that answered it was killed so soon that it may not have brought its row before
    may_be_uncounted: a replica died so soon that it may not have told two routers what it had computed
    """

    name: str
    tenant: str
    most: tuple[int, int]
    usage: tuple[int, int] | None = None
    repeats: str = ""
    was_taken: bool = True
    num_lost: int = 0
    may_lack_row: bool = False
    may_be_uncounted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a ledger holds at one moment, by the names of SPENT; of requests their number, too.

    rows:         by request id
    told, days:   of all rows, and of all lines of days, those without a row included; by tenant
    unattributed: by tenant
    counted:      by replica and tenant
    """

    rows: Mapping[str, Sequence[Sums]] = field(default_factory=dict)
    told: Mapping[str, Sums] = field(default_factory=dict)
    days: Mapping[str, Sums] = field(default_factory=dict)
    unattributed: Mapping[str, Sums] = field(default_factory=dict)
    counted: Mapping[tuple[str, str], Sums] = field(default_factory=dict)

    def row(self, name: str) -> Sums | None:
        """The only one of this request, or the first."""
        return next(iter(self.rows.get(name, ())), None)


def kept_in(store: str | URL) -> Kept:
    """Of a store in SQLite or PostgreSQL, which somebody else may write meanwhile."""
    each, added = ", ".join(SPENT), ", ".join(f"sum({name})" for name in SPENT)
    engine = create_engine(store, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql(BEGIN[engine.dialect.name])
        rows: dict[str, list[Sums]] = {}
        for (name,), amounts in _read(connection, f"select request_id, 1, {each} from ledger"):
            rows.setdefault(name, []).append(amounts)
        of_days = f"select tenant, sum(requests), {added} from days"
        return Kept(
            rows=rows,
            told=_by_tenant(connection, f"select tenant, count(*), {added} from ledger group by tenant"),
            days=_by_tenant(connection, f"{of_days} group by tenant"),
            unattributed=_by_tenant(connection, f"{of_days} where key_id = '{UNATTRIBUTED}' group by tenant"),
            counted={
                (replica, flow): amounts
                for (replica, flow), amounts in _read(connection, f"select replica_id, flow, 0, {each} from counted")
            },
        )


def disagreements(
    kept: Kept, asked: Sequence[Asked], shown: Mapping[tuple[str, str], Mapping[str, int]] | None = None
) -> list[str]:
    """What is wrong now, in words; nothing, some seconds after the last request.

    asked: all that these tenants asked, but for what nobody disturbed
    shown: what living replicas say of themselves, by replica and tenant: some of SPENT
    """
    by_name = {each.name: each for each in asked}
    wrong = [contradiction for each in asked for contradiction in _of_request(kept, each, by_name)]
    for tenant in sorted({each.tenant for each in asked}):
        wrong += _of_sums(kept, tenant)
        wrong += _of_unattributed(kept, tenant, [each for each in asked if each.tenant == tenant])
    for (replica, tenant), amounts in (shown or {}).items():
        known = kept.counted.get((replica, tenant), Counter())
        wrong += [
            f"{replica} shows {amount} {name} for {tenant}, and {known[name]} are known"
            for name, amount in amounts.items()
            if amount != known[name]
        ]
    return wrong


def usage_of(answer: httpx.Response) -> tuple[int, int] | None:
    """Prompt and completion tokens as it tells them; None where it is no success, or a stream that was broken off."""
    if answer.status_code != 200:
        return None
    if not answer.headers["content-type"].startswith("text/event-stream"):
        found = [answer.json()]
    else:
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        found = [json.loads(event) for event in events if event != "[DONE]"]
        if "[DONE]" not in events or any("error" in each for each in found):
            return None
    [usage] = [each["usage"] for each in found if each.get("usage")]
    return usage["prompt_tokens"], usage["completion_tokens"]


def unexplained(kept: Kept, each: Asked) -> tuple[int, int]:
    """What of the unattributed this request may be the reason of at most, in the order of TOKENS.

    A row tells what its router was told (`Accounting._row`), and a router is told all of what ends (`RunStats.note`).
    So nothing is left of a whole answer with a row but what a replica that was lost had computed and not told;
    without one, itself. What was cut off or left may go on where its router does not see it,
    and has no row where the router did not know yet that it was taken (`Completions._answer`). Of what was refused
    before nothing is left.
    """
    if each.repeats:
        return 0, 0  # nothing was computed for it
    row, end = kept.row(each.name) or Counter[str](), each.most if each.usage is None else each.usage
    own = [max(0, amount - row[name]) * each.was_taken for name, amount in zip(TOKENS, end, strict=True)]
    prompt, completion = (amount + each.num_lost * most for amount, most in zip(own, each.most, strict=True))
    return prompt, completion


def _of_request(kept: Kept, each: Asked, by_name: Mapping[str, Asked]) -> Iterator[str]:
    rows = kept.rows.get(each.name, ())
    if len(rows) > 1:
        yield f"{each.name} has {len(rows)} rows"
    for row in rows:
        if any(row[name] > most for name, most in zip(TOKENS, each.most, strict=True)):
            yield f"{each.name} has a row of more than it may come to: {_tokens(row)} of {each.most}"
    if each.repeats:
        if rows:
            yield f"{each.name} was given an answer again and has a row"
        yield from _of_answer(kept, each, by_name[each.repeats])
    else:
        yield from _of_answer(kept, each, each)


def _of_answer(kept: Kept, each: Asked, computed: Asked) -> Iterator[str]:
    """computed: the request whose answer it got, most often itself"""
    row = kept.row(computed.name)
    if each.usage is None:
        return
    if computed.usage is not None and computed.usage != each.usage:
        yield f"{each.name} was told of {each.usage} and {computed.name} of {computed.usage}"
    if row is None and not computed.may_lack_row:
        yield f"{each.name} was told of {each.usage} and {computed.name} has no row"
    if row is not None and _tokens(row) != each.usage:
        yield f"{each.name} was told of {each.usage} and the row of {computed.name} of {_tokens(row)}"


def _of_sums(kept: Kept, tenant: str) -> Iterator[str]:
    rows, rest, days = (sums.get(tenant, Counter()) for sums in (kept.told, kept.unattributed, kept.days))
    counted = _added(amounts for (_, flow), amounts in kept.counted.items() if flow == tenant)
    for name in ("requests", *SPENT):
        if rows[name] + rest[name] != days[name]:
            yield f"{tenant}: {rows[name]} {name} of rows and {rest[name]} of none are not the {days[name]} of days"
        if name in SPENT and days[name] != counted[name]:
            yield f"{tenant}: {days[name]} {name} are not the {counted[name]} that replicas counted"


def _of_unattributed(kept: Kept, tenant: str, asked: Iterable[Asked]) -> Iterator[str]:
    """No more than what requests explain that did not end well, and no less than whole answers without a row."""
    rest, most, least = kept.unattributed.get(tenant, Counter[str]()), Counter[str](), Counter[str]()
    for each in asked:
        most.update(dict(zip(TOKENS, unexplained(kept, each), strict=True)))
        if each.usage and not (each.repeats or each.may_be_uncounted) and kept.row(each.name) is None:
            least.update(dict(zip(TOKENS, each.usage, strict=True)))
    for name in TOKENS:
        if not least[name] <= rest[name] <= most[name]:
            yield f"{tenant}: {rest[name]} {name} are unattributed, and {least[name]} to {most[name]} may be"
    if not most.total() and any(rest[name] for name in SPENT):
        yield f"{tenant}: {dict(rest)} is unattributed, and every request has its row"


def _tokens(row: Sums) -> tuple[int, int]:
    return row["prompt_tokens"], row["completion_tokens"]


def _added(sums: Iterable[Sums]) -> Sums:
    added: Sums = Counter()
    for each in sums:
        added.update(each)
    return added


def _by_tenant(connection: Connection, question: str) -> dict[str, Sums]:
    return {tenant: amounts for (tenant,), amounts in _read(connection, question)}


def _read(connection: Connection, question: str) -> Iterator[tuple[tuple[str, ...], Sums]]:
    """Keys, and by them requests and SPENT, which the question has last."""
    names = ("requests", *SPENT)
    for found in connection.exec_driver_sql(question):
        yield found[: -len(names)], Counter(dict(zip(names, map(int, found[-len(names) :]), strict=True)))
