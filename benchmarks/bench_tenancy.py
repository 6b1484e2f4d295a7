"""CPU time that keys, limits and the ledger cost a router per request: no Ray, no server, no engine.

    python -m benchmarks.bench_tenancy --rounds 60

One plain request of one token goes the whole way of the application, as an ASGI server calls it, until its body was
sent. Three applications take turns, in an order that turns too: `none` asks nobody, `keys` asks for a key, `books` asks
for a key, keeps every limit there is and writes each request down; bringing its rows to the ledger is counted with it.
What another process does (lending, keeping rows) is not.
Prints JSON, in microseconds of this process per request: of each its least and its median; `more` is what `keys` and
`accounting` cost beyond `none`: the difference of the least ones, and the median of the differences within a round.
`stages` are the pieces of `accounting`, each called alone and again and again: their least and their median.
`refused` are requests that are sent away: `limited` by a tenant's limits (429), `unknown` as there is no such model,
`hidden` as the tenant may not use it, and such pairs of adapters, of those of a base of which it may use none, and of
aliases.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import pickle
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from serve_app.api.completion import CompletionRequest
from serve_app.api.limits import DEFAULT_LIMITS
from serve_app.api.paths import Path
from serve_app.core.delta import Delta, Finish, FinishReason, PromptReport
from serve_app.core.ledger import Counted, Row, UsageLine, UsageQuestion
from serve_app.core.tenants import Lease, Limits, Rights, Statement, Tenant
from serve_app.core.tenants import Scope as Scopes
from serve_app.http.app import build_app
from serve_app.http.exchange import rate_headers
from serve_app.http.guard import Door, Guard
from serve_app.http.styles import STYLES
from serve_app.router.accounting import Accounting
from serve_app.router.fleet import Fleet
from serve_app.router.idempotency import Replays
from serve_app.router.ledger_writer import LedgerWriter
from serve_app.router.quotas import Quotas
from serve_app.router.router import Router
from serve_app.router.run import Run
from serve_app.tenants.keys import Directory, Key, digest_of, new_key
from serve_app.tenants.lending import Lending
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card

ROUTER = "router-0"
BODY = json.dumps({"model": "tiny", "prompt": "Once", "max_tokens": 1}).encode()
PEPPER = b"p" * 32
LIMITS = Limits(
    requests_per_minute=10**9,
    tokens_per_minute=10**12,
    max_in_flight=10**6,
    max_in_flight_tokens=10**9,
    budget_per_day=1e9,
    budget_per_month=1e9,
)


class NearAccounts:
    """Accounts without the way to them; they keep no rows, as that is another process's work."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._lending = Lending(lambda tenant: limits, clock=time.monotonic, wall=time.time)

    async def renew(self, router_id: str, statements: Sequence[Statement]) -> Sequence[Lease]:
        return [self._lending.renew(router_id, each) for each in statements]

    async def record(self, rows: Sequence[Row], counted: Sequence[Counted]) -> None:
        pickle.dumps((rows, counted))  # as Ray does

    async def usage(self, question: UsageQuestion) -> Sequence[UsageLine]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A router's whole tenancy around one replica that says what it is told to say."""

    backend: FakeBackend
    fleet: Fleet
    accounting: Accounting
    tenant: Tenant
    directory: Directory
    key: str

    @staticmethod
    async def make() -> Setup:
        card = replica_card(model=model_card("tiny", adapter_card("pirate"), adapter_card("json")))
        backend, accounts, key = FakeBackend(card, is_stepped=True), NearAccounts(), new_key()
        fleet = Fleet(ROUTER, aliases={"prod": "tiny:json"})
        fleet.put(await backend.hello(ROUTER), backend)
        tenant = Tenant(name="team", limits=LIMITS)
        held = Key(id="key", tenant="team", digest=digest_of(key, PEPPER), scopes=frozenset(Scopes), created_at=0.0)
        accounting = Accounting(Quotas(ROUTER, accounts), LedgerWriter(accounts, fleet.counts))
        directory = Directory([tenant], [held], pepper=PEPPER)
        return Setup(backend=backend, fleet=fleet, accounting=accounting, tenant=tenant, directory=directory, key=key)

    def apps(self) -> dict[str, ASGIApp]:
        held = [
            Key(id="key", tenant="team", digest=digest_of(self.key, PEPPER), scopes=frozenset(Scopes), created_at=0)
        ]
        free = Directory([Tenant(name="team")], held, pepper=PEPPER)
        return {
            "none": build_app(Router(self.fleet)),
            "keys": build_app(Router(self.fleet), door=_door(free)),
            "books": build_app(
                Router(self.fleet, accounting=self.accounting), door=_door(self.directory), replays=Replays()
            ),
        }


class Client:
    """Sends one request, and knows when it was answered."""

    def __init__(self, body: bytes = BODY) -> None:
        self.status = 0
        self._is_over = asyncio.Event()
        self._messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive(self) -> Message:
        if not self._messages:
            await self._is_over.wait()
            return {"type": "http.disconnect"}
        return self._messages.pop()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif not message.get("more_body", False):
            self._is_over.set()


async def spend(setup: Setup, app: ASGIApp, num: int) -> float:
    """Seconds of this process for so many requests that are there together."""
    setup.backend.submissions.clear()
    clients = [Client() for _ in range(num)]
    began = time.process_time()
    tasks = [asyncio.ensure_future(_call(app, _scope(setup.key), client)) for client in clients]
    while len(setup.backend.submissions) < num:  # noqa: ASYNC110
        await asyncio.sleep(0)
    setup.backend.send(ROUTER, *(_answer_to(each.request_id) for (each,) in setup.backend.submissions))
    await asyncio.gather(*tasks)
    await setup.accounting.ledger_writer.flush()
    spent = time.process_time() - began
    assert {client.status for client in clients} == {200}, "every request is answered"
    return spent


async def in_turns(setup: Setup, *, rounds: int, num: int) -> dict[str, object]:
    """What each application takes."""
    apps = setup.apps()
    for app in apps.values():
        await spend(setup, app, num)
    gc.freeze()
    taken: dict[str, list[float]] = {name: [] for name in apps}
    for number in range(rounds):
        names = list(apps)
        turned = names[number % len(names) :] + names[: number % len(names)]
        for name in turned:
            gc.collect()
            taken[name].append(await spend(setup, apps[name], num) * 1e6 / num)
    return {
        "whole": {name: _summary(each) for name, each in taken.items()},
        "more": {name: _difference(taken["none"], taken[name]) for name in ("keys", "books")},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A kind of request that is sent away, and how."""

    app: ASGIApp
    key: str
    body: bytes
    status: int

    async def ask(self, num: int) -> float:
        """Seconds of this process for so many, one behind the other."""
        clients = [Client(self.body) for _ in range(num)]
        began = time.process_time()
        for client in clients:
            await _call(self.app, _scope(self.key), client)
        spent = time.process_time() - began
        assert {client.status for client in clients} == {self.status}, "every request is refused"
        return spent


UNSEEN = {
    "model": ("barred", "tiny", "none", 404),
    "adapter": ("pirate", "tiny:json", "tiny:nope", 404),
    "LoRA": ("base", "tiny:json", "tiny:nope", 400),
    "alias": ("base", "prod", "none", 404),
}
"""A tenant, what it may not use, what never was, and how it is told."""


async def kinds_of_refusals(setup: Setup) -> dict[str, Refused]:
    """Of a tenant that may ask once a minute and has, and of some that may not use everything."""
    limits = Limits(requests_per_minute=1)
    rights = {"barred": ("other",), "pirate": ("tiny", "tiny:pirate"), "base": ("tiny",)}
    tenants = [Tenant(name="spent", limits=limits)]
    tenants += [Tenant(name=name, rights=Rights(patterns=patterns)) for name, patterns in rights.items()]
    secrets = {tenant.name: new_key() for tenant in tenants}
    scopes = frozenset(Scopes)
    keys = [
        Key(id=name, tenant=name, digest=digest_of(secret, PEPPER), scopes=scopes, created_at=0.0)
        for name, secret in secrets.items()
    ]
    accounts = NearAccounts(limits)
    accounting = Accounting(Quotas(ROUTER, accounts), LedgerWriter(accounts, setup.fleet.counts))
    app = build_app(Router(setup.fleet, accounting=accounting), door=_door(Directory(tenants, keys, pepper=PEPPER)))
    first = Client()
    setup.backend.submissions.clear()
    asking = asyncio.ensure_future(_call(app, _scope(secrets["spent"]), first))
    while not setup.backend.submissions:  # noqa: ASYNC110
        await asyncio.sleep(0)
    setup.backend.send(ROUTER, *(_answer_to(each.request_id) for (each,) in setup.backend.submissions))
    await asking
    assert first.status == 200, "the first of a minute is answered"
    kinds = {"limited": Refused(app=app, key=secrets["spent"], body=BODY, status=429)}
    for what, (name, *models, status) in UNSEEN.items():
        for kind, model in zip(("hidden", "unknown"), models, strict=True):
            body = BODY.replace(b"tiny", model.encode())
            kinds[f"{kind} {what}"] = Refused(app=app, key=secrets[name], body=body, status=status)
    return kinds


async def refusals(setup: Setup, *, rounds: int, num: int) -> dict[str, object]:
    """What each kind takes, in turns."""
    kinds = await kinds_of_refusals(setup)
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds):
        names = list(kinds)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            taken[name].append(await kinds[name].ask(num) * 1e6 / num)
    return {name: _summary(each) for name, each in taken.items()}


async def stages(setup: Setup, *, rounds: int, num: int) -> dict[str, object]:
    """The pieces alone. A run stands open meanwhile, answered and not yet written down."""
    app = setup.apps()["books"]
    await spend(setup, app, num)
    router = Router(setup.fleet, accounting=setup.accounting).seen_by(setup.tenant)
    guard = Guard(_door(setup.directory), lambda tenant: app, lambda: None)
    style = STYLES[Path.COMPLETIONS]
    request = router.settled(style.parse(router, BODY, DEFAULT_LIMITS, lambda model: router.dialect))
    run = await _answered(setup, router, request)
    identity = setup.directory.identify(setup.key, time.time())
    permits = []

    async def reserve() -> None:
        permits.append(await router.reserve(run))

    def close() -> None:
        setup.accounting.close(identity, run, request_id="r", status=200, permit=permits.pop() if permits else None)

    async def bring() -> None:
        for _ in range(num):
            close()
        began = time.process_time()
        await setup.accounting.ledger_writer.flush()
        brought.append((time.process_time() - began) * 1e6 / num)

    brought: list[float] = []
    for _ in range(rounds):
        await bring()
    sync: Mapping[str, Callable[[], object]] = {
        "identify": lambda: setup.directory.identify(setup.key, time.time()),
        "admit": lambda: guard._admit(_scope(setup.key), setup.key),
        "routes": lambda: guard._of(setup.tenant),
        "lower": lambda: router.lowered(request, "r"),
        "headers": lambda: rate_headers(router.rates),
    }
    found = {name: await _timed(_later(piece), rounds, num) for name, piece in sync.items()}
    found["reserve"] = await _timed(reserve, rounds, num)
    found["close"] = await _timed(_later(close), rounds, num)
    return {**found, "bring": _summary(brought)}


async def _answered(setup: Setup, router: Router, request: CompletionRequest) -> Run:
    setup.backend.submissions.clear()
    run = router.open(request)
    async with run:
        [[submitted]] = setup.backend.submissions
        setup.backend.send(ROUTER, _answer_to(submitted.request_id))
        async for _ in run:
            pass
    return run


async def _timed(piece: Callable[[], Awaitable[object]], rounds: int, num: int) -> dict[str, float]:
    taken = []
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(num):
            await piece()
        taken.append((time.process_time() - began) * 1e6 / num)
    return _summary(taken)


def _later(piece: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    async def called() -> object:
        return piece()

    return called


async def _call(app: ASGIApp, scope: Scope, client: Client) -> None:
    await app(scope, client.receive, client.send)


def _door(directory: Directory) -> Door:
    return Door(identify=lambda presented: directory.identify(presented, time.time()))


def _scope(key: str) -> Scope:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
        "headers": [
            (b"host", b"x"), (b"content-type", b"application/json"), (b"authorization", f"Bearer {key}".encode()),
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "state": {},
    }  # fmt: skip


def _answer_to(request_id: str) -> Delta:
    finish = Finish(reason=FinishReason.LENGTH, matched_stop=None, num_tokens=1)
    report = PromptReport(num_tokens=4, num_cached_tokens=0)
    return Delta(request_id=request_id, sample=0, text=" word", token_ids=(1000,), prompt=report, finish=finish)


def _summary(taken: Sequence[float]) -> dict[str, float]:
    return {"min": round(min(taken), 1), "median": round(statistics.median(taken), 1)}


def _difference(less: Sequence[float], more: Sequence[float]) -> dict[str, float]:
    pairs = [b - a for a, b in zip(less, more, strict=True)]
    return {"min": round(min(more) - min(less), 1), "median": round(statistics.median(pairs), 1)}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--requests", type=int, default=32, help="that are there together in a round")
    args = parser.parse_args()
    setup = await Setup.make()
    report = await in_turns(setup, rounds=args.rounds, num=args.requests)
    report["stages"] = await stages(setup, rounds=args.rounds, num=args.requests)
    report["refused"] = await refusals(setup, rounds=args.rounds, num=args.requests)
    print(json.dumps({"us_per_request": report}, indent=1))
    await setup.fleet.close()


if __name__ == "__main__":
    asyncio.run(main())
