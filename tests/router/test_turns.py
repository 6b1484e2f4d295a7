"""Turns keep the replicas busy with few requests at a time, and divide these among tenants."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.core.errors import Unavailable
from serve_app.core.shares import Share
from serve_app.router import admission
from serve_app.router.admission import Admission, AdmissionSettings, Room, Ticket
from serve_app.router.turns import MIN_AT_WORK, MIN_EACH

ROOM = Room(num_slots=8, num_places=4096)
ONE, TWO = Share(flow="one"), Share(flow="two")


class House:
    """An admission, and who of those that it has let in is at work."""

    def __init__(self, *models: str) -> None:
        rooms = dict.fromkeys(models or ("m",), ROOM)
        self.admission = Admission(lambda: rooms, AdmissionSettings(max_wait_s=1e9))
        self.at_work: list[Ticket] = []
        self.tasks: dict[Ticket, asyncio.Task[None]] = {}

    async def come(self, share: Share = ONE, *, model: str = "m", number: int = 1) -> list[Ticket]:
        tickets = [self.admission.enter(share) for _ in range(number)]
        for ticket in tickets:
            self.tasks[ticket] = asyncio.create_task(self._work(ticket, model))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return tickets

    async def leave(self, ticket: Ticket) -> None:
        self.at_work.remove(ticket)
        ticket.give_back({"m": 1})
        for _ in range(4):
            await asyncio.sleep(0)

    def num_of(self, share: Share) -> int:
        return sum(each.share == share for each in self.at_work)

    async def _work(self, ticket: Ticket, model: str) -> None:
        await ticket.turn()
        ticket.grow({model: 1})
        await ticket.turn()
        self.at_work.append(ticket)


async def test_no_more_are_at_work_than_keep_the_replicas_busy_and_the_others_follow_in_their_order() -> None:
    house = House()
    tickets = await house.come(number=200)
    assert house.at_work == tickets[:MIN_AT_WORK]
    for each in tickets[:100]:
        await house.leave(each)
    assert house.at_work == tickets[100 : 100 + MIN_AT_WORK]


async def test_who_leaves_while_it_waits_takes_nobodys_turn() -> None:
    house = House()
    tickets = await house.come(number=MIN_AT_WORK + 2)
    gone, last = tickets[-2:]
    house.tasks[gone].cancel()
    gone.give_back()
    await house.leave(tickets[0])
    assert house.at_work[-1] is last
    for each in list(house.at_work):
        await house.leave(each)
    assert house.admission.num_open == 0


async def test_a_tenant_that_comes_late_begins_at_once_and_gets_its_share() -> None:
    house = House()
    await house.come(ONE, number=300)
    await house.come(TWO, number=300)
    assert MIN_EACH <= house.num_of(TWO) <= MIN_AT_WORK // 2
    for _ in range(300):
        await house.leave(house.at_work[0])
    assert house.num_of(ONE) == pytest.approx(house.num_of(TWO), abs=2)


async def test_a_crowd_of_one_model_keeps_nobody_from_another() -> None:
    house = House("m", "other")
    await house.come(model="m", number=300)
    (one,) = await house.come(model="other")
    assert one in house.at_work


async def test_a_router_that_stops_ends_those_who_wait() -> None:
    house = House()
    tickets = await house.come(number=MIN_AT_WORK + 1)
    house.admission.stop(Unavailable("It stops."))
    with pytest.raises(Unavailable, match="It stops"):
        await house.tasks[tickets[-1]]


async def test_many_refusals_are_told_at_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    full = Admission(lambda: {}, clock=lambda: 100.0)
    monkeypatch.setattr(admission.asyncio, "sleep", sleep)
    for _ in range(2000):
        await full.may_tell()
    assert slept[0] == pytest.approx(1 / admission.REFUSALS_PER_S)
    assert max(slept) == admission.MAX_REFUSAL_DELAY_S == slept[-1]
