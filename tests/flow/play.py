"""Clients of two routers and two replicas, of which one may die, and all that each of them knows in the end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import httpx

from serve_app.core.ledger import Spent
from tests.agreement import SPENT, Asked, Kept, kept_in, usage_of
from tests.fakes import FakeBackend
from tests.flow.bookkeeping import TENANTS, FakeAccounts, House, backend, flushed, house


@dataclass(slots=True)
class Client:
    """One request of a play. Its prompt names it, so that replicas tell what they computed for it.

    is_brought: its router has told the ledger since it was over
    """

    name: str
    tenant: str
    house: House
    num_words: int
    max_tokens: int
    n: int
    task: asyncio.Task[httpx.Response]
    has_left: bool = False
    is_brought: bool = False

    @property
    def usage(self) -> tuple[int, int] | None:
        """Of an answer that came whole."""
        return None if self.has_left or self.task.cancelled() else usage_of(self.task.result())


@dataclass(slots=True)
class Play:
    """Two routers and two replicas, of which at most one dies, and clients. All that the ledger knows was brought by a
    router, which had it from a replica by a frame or a hello.

    houses: routers that live;  killed, dead: the router or the replica that died
    """

    accounts: FakeAccounts
    drawn: random.Random
    replicas: list[FakeBackend] = field(default_factory=lambda: [backend(each, is_stepped=True) for each in range(2)])
    houses: list[House] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    killed: House | None = None
    dead: FakeBackend | None = None

    def __post_init__(self) -> None:
        self.houses += [house(self.accounts, self.replicas, f"router-{number}") for number in range(2)]

    @property
    def kept(self) -> Kept:
        return kept_in(self.accounts.store.engine.url)

    async def run(self, *, dies_at: int | None, share_leaving: float) -> None:
        """Until all is over and told."""
        for turn in range(45):
            if turn == dies_at:
                await self.kill_one()
            for each in self.houses:
                if self.drawn.random() < 0.4 and turn < 40:
                    self.ask(each)
                if self.clients and self.drawn.random() < share_leaving:
                    client = self.drawn.choice(self.clients)
                    client.has_left |= client.house is not self.killed and client.task.cancel()
                if self.drawn.random() < 0.2:
                    await self.flush(each)
            await self.step()
        while not all(client.task.done() for client in self.clients):
            await self.step()  # also what moved from a replica that died
        while any(replica.num_live for replica in self.replicas):
            await self.step()
        for each in self.houses:
            for replica in self.replicas:  # the next hello, of those that can still say it
                if replica is not self.dead:
                    each.fleet.hear(await replica.hello("anybody"))
        self.accounts.drops = None
        for each in self.houses:
            await self.flush(each)

    def ask(self, house: House) -> None:
        tenant, name = self.drawn.choice(["acme", "beta"]), f"client-{len(self.clients)}"
        num_words, n, max_tokens = self.drawn.randint(1, 5), self.drawn.randint(1, 2), self.drawn.randint(1, 15)
        body = {
            "model": self.drawn.choice(["tiny", "tiny:pirate"]),
            "prompt": " ".join([*["word"] * (num_words - 1), name]),
            "n": n,
            "max_tokens": max_tokens,
        }
        if self.drawn.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"x-api-key": tenant, "x-request-id": name}
        task = asyncio.create_task(house.client.post("/v1/completions", json=body, headers=headers))
        house.tasks.append(task)
        self.clients.append(Client(name, tenant, house, num_words, max_tokens, n, task))

    async def kill_one(self) -> None:
        victim = self.drawn.randrange(4)
        if victim < 2:
            self.killed = self.houses.pop(victim)
            await self.killed.kill()
        else:
            self.dead = self.replicas[victim - 2]
            self.dead.die()

    async def step(self) -> None:
        await asyncio.sleep(0)
        for replica in self.replicas:
            replica.step()

    async def flush(self, house: House) -> None:
        """What was over before it, the ledger knows behind it, unless the call is lost."""
        over = [client for client in self.clients if client.house is house and client.task.done()]
        self.accounts.has_lost = False
        await flushed(house, is_sure=self.accounts.drops is None)
        for client in over:
            client.is_brought |= not self.accounts.has_lost
        kept = self.kept
        for tenant in TENANTS:
            counted = sum((sums for (_, flow), sums in kept.counted.items() if flow == tenant), Counter[str]())
            days = kept.days.get(tenant, Counter())
            assert {name: days[name] for name in SPENT} == {name: counted[name] for name in SPENT}, "at any moment"

    def spent_on(self, client: Client) -> list[tuple[FakeBackend, Spent]]:
        """What every attempt at it came to, on which replica."""
        return [
            (replica, replica.spent_on.get(request.request_id, Spent(flow=client.tenant)))
            for replica in self.replicas
            for submission in replica.submissions
            for request in submission
            if str(request.prompt.parts[0]).split()[-1] == client.name
        ]

    def asked(self, client: Client) -> Asked:
        """As the ledger is held to it: it may lack the row of a router that died before it brought it."""
        attempts = self.spent_on(client)
        return Asked(
            name=client.name,
            tenant=client.tenant,
            most=(client.num_words, client.n * client.max_tokens),
            usage=client.usage,
            was_taken=bool(attempts),
            num_lost=max(0, len(attempts) - 1),
            may_lack_row=client.house is self.killed and not client.is_brought,
        )
