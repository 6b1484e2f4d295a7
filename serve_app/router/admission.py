"""Decides at the door which requests are taken in: what replicas can hold, and can begin within a bearable time."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import MappingProxyType

from serve_app.core.bounded import PositiveFloat, PositiveInt
from serve_app.core.errors import Overloaded, ServeError, Unauthenticated, Unavailable
from serve_app.core.shares import BATCH, Share
from serve_app.router.appointments import MAX_RETRY_S, Appointments, Pace
from serve_app.router.turns import Active, Turns, is_room

MAX_BOOKS = 1024
"""Appointment books that a model keeps, one per flow; a flow whose book is dropped begins a new one."""
KEPT_PART = 8
"""One place of so many is kept for flows below their share, if several flows ask."""
END_S = 2.0
"""Time for requests that were told to end."""
REFUSALS_PER_S = 200.0
"""Further refusals are told later: clients that retry at once would take the router's time from admitted requests."""
MAX_REFUSAL_DELAY_S = 5.0
ANYBODY = Share()
NOBODY: Mapping[str, int] = MappingProxyType({})


class Reason(StrEnum):
    """Why a request was refused: too many open requests, no place at its model, or too long a wait."""

    OPEN = "open_requests"
    PLACES = "places"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Sequences that all open replicas of a model hold together.

    num_slots:   computed at once;  num_places: computed or queued
    num_foreign: held for other routers, as last heard of
    """

    num_slots: int
    num_places: int
    num_foreign: int = 0

    def __add__(self, other: Room) -> Room:
        return Room(
            num_slots=self.num_slots + other.num_slots,
            num_places=self.num_places + other.num_places,
            num_foreign=self.num_foreign + other.num_foreign,
        )


@dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    """When the router refuses a request at once.

    max_wait_s:         the router refuses a request with 503 and Retry-After if its first step is predicted later
    max_open_requests:  requests served at once, those still being read included; keep it below Serve's own
                        max_ongoing_requests, whose refusals are no JSON
    """

    max_wait_s: PositiveFloat = 30.0
    max_open_requests: PositiveInt = 4096


@dataclass(slots=True, kw_only=True)
class Gate:
    """What one model has admitted, by flow: the pace, the turns and the appointments of refused clients.

    num_batch: of those inside, in the class `batch`: nobody of another class waits behind these
    """

    pace: Pace
    turns: Turns
    appointments: dict[str, Appointments] = field(default_factory=dict)
    num_inside: int = 0
    num_batch: int = 0
    inside: Counter[str] = field(default_factory=Counter)

    def add(self, share: Share, size: int) -> None:
        self.num_inside += size
        self.num_batch += size if share.priority == BATCH else 0
        self.inside[share.flow] += size
        if not self.inside[share.flow]:
            del self.inside[share.flow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """What would be too much, and for how long."""

    reason: Reason
    gate: Gate
    seconds: float


def _nothing_to_end(error: ServeError) -> None:
    """End a request that nobody computes yet."""


class Ticket:
    """A request's place, from admission to its last byte. It counts as one sequence until its body is read.

    share:    of whom it is;  key_id: of the key that it came with, "" where there is none
    is_known: whether it has grown;  sizes: sequences that count, by model
    """

    def __init__(self, admission: Admission, share: Share) -> None:
        self.share = share
        self.key_id = ""
        self.is_known = False
        self.sizes: Mapping[str, int] = {}
        self._admission = admission
        self._end: Callable[[ServeError], None] = _nothing_to_end
        self._is_returned = False

    def grow(self, sizes: Mapping[str, int]) -> None:
        """Take the places that the request really needs. Raises Overloaded and Unavailable, and then takes none."""
        self._admission.grow(self, sizes)

    async def turn(self) -> None:
        """Wait until replicas have use for the request: before `grow` those of any model, after it those of its own.

        Raises what it is ended with meanwhile.
        """
        await self._admission.turn(self)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Hold only a place among the open requests meanwhile: no replica is there yet. Wait for a turn afterwards."""
        try:
            with self._admission.resting(self):
                yield
        finally:
            self._end = _nothing_to_end

    def ends_by(self, end: Callable[[ServeError], None]) -> None:
        """Say how to end the request if the router stops, or its key is revoked, before it is over."""
        self._end = end

    def end(self, error: ServeError) -> None:
        """End the request, once."""
        end, self._end = self._end, _nothing_to_end
        end(error)
        self._admission.fail(self, error)

    def give_back(self, completed: Mapping[str, int] | None = None) -> None:
        """Give the place back; completed: sequences that ended by themselves, by model."""
        if not self._is_returned:
            self._is_returned = True
            self._admission.leave(self, completed or {})


class Admission:
    """Outlives applications and settings, as it counts what is inside.

    rooms:  what the replicas can hold now, by model; a model that is not there is not bounded
    jitter: gives a number from 0 to 1

    A request is let in where its model has places for all its sequences and would begin the first of them within
    `max_wait_s`: sequences ahead that find no slot, divided by the measured pace. Who is refused gets an appointment:
    the time at which the excess has gone and all those refused before have come again, one by one at that pace. Clients
    that keep their appointments come no faster than they can be served.
    """

    def __init__(
        self,
        rooms: Callable[[], Mapping[str, Room]],
        settings: AdmissionSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.settings = settings or AdmissionSettings()
        self.refusals: Counter[Reason] = Counter()
        self._rooms = rooms
        self._clock = clock
        self._jitter = jitter
        self._active = Active(clock)
        self._gates: dict[str, Gate] = {}
        self._door = self._new_gate(self.settings.max_open_requests, Turns(self._may_pass, self._used_by))
        self._tickets: dict[Ticket, None] = {}
        self._unknown: Counter[str] = Counter()  # tickets that have not grown, by flow
        self._closed: Unavailable | None = None  # who is inside goes on
        self._stopped: Unavailable | None = None
        self._left = asyncio.Event()
        self._last_told_at = 0.0  # when the refusal that was made last is told

    @property
    def num_open(self) -> int:
        """Requests that are open."""
        return len(self._tickets)

    @property
    def is_stopped(self) -> bool:
        """Whether the router admits nobody any more."""
        return self._closed is not None

    @property
    def predicted_waits_s(self) -> dict[str, float]:
        """Seconds that a request that came now would wait for its first step, by model."""
        return {model: self._wait_s(self._gate(model, room), room) for model, room in self._rooms().items()}

    @property
    def sequences(self) -> dict[str, tuple[int, int]]:
        """Sequences that are admitted, and places for sequences, by model."""
        return {model: (self._gate(model, room).num_inside, room.num_places) for model, room in self._rooms().items()}

    def free_slots(self, model: str) -> int:
        """Return how many sequences replicas could begin at once beside those that are admitted; below 0 some wait."""
        room = self._rooms().get(model)
        return 0 if room is None else room.num_slots - self._gate(model, room).num_inside - room.num_foreign

    def enter(self, share: Share = ANYBODY) -> Ticket:
        """Admit a request of which only the tenant is known.

        Raises Overloaded where no model could take even one sequence, and Unavailable once the router is stopped.
        """
        self.check_open()
        self._active.note(share)
        num_own = self._door.inside[share.flow] + 1
        if self.num_open >= self._num_left(self.settings.max_open_requests, share.flow, num_own, num_slots=0):
            raise self._refused(Excess(reason=Reason.OPEN, gate=self._door, seconds=0.0), share)
        found = [self._excess(model, room, share, 1, self._unknown) for model, room in self._rooms().items()]
        excesses = [excess for excess in found if excess is not None]
        if excesses and len(excesses) == len(found):
            raise self._refused(min(excesses, key=lambda excess: excess.seconds), share)
        ticket = Ticket(self, share)
        self._tickets[ticket] = None
        self._door.add(share, 1)
        self._unknown[share.flow] += 1
        return ticket

    async def may_tell(self) -> None:
        """Wait until one more client may be told that it is refused."""
        now = self._clock()
        told_at = max(now, self._last_told_at + 1 / REFUSALS_PER_S)
        self._last_told_at = min(told_at, now + MAX_REFUSAL_DELAY_S)
        if self._last_told_at > now:
            await asyncio.sleep(self._last_told_at - now)

    def grow(self, ticket: Ticket, sizes: Mapping[str, int]) -> None:
        """As Ticket.grow."""
        assert ticket in self._tickets, "the ticket was given back"
        assert not ticket.is_known, "a ticket grows once"
        if self._stopped is not None:
            raise self._stopped
        rooms = self._rooms()
        for model, size in sizes.items():
            excess = self._excess(model, rooms[model], ticket.share, size, NOBODY) if model in rooms else None
            if excess is not None:
                raise self._refused(excess, ticket.share)
        self._note(rooms)
        self._unknown[ticket.share.flow] -= 1
        ticket.is_known = True
        ticket.sizes = {model: size for model, size in sizes.items() if model in self._gates}
        for model, size in ticket.sizes.items():
            self._gates[model].add(ticket.share, size)

    def leave(self, ticket: Ticket, completed: Mapping[str, int]) -> None:
        """As Ticket.give_back."""
        is_full = self.num_open >= self.settings.max_open_requests
        self._door.pace.note(self._clock(), is_busy=is_full, num_completed=1)
        del self._tickets[ticket]
        self._left.set()
        self._door.add(ticket.share, -1)
        self._unknown[ticket.share.flow] -= not ticket.is_known
        if not self._unknown[ticket.share.flow]:
            del self._unknown[ticket.share.flow]
        self._note(self._rooms(), completed)
        for model, size in ticket.sizes.items():
            self._gates[model].add(ticket.share, -size)
            self._gates[model].turns.leave(ticket, ticket.share.flow)
        self._door.turns.leave(ticket, ticket.share.flow)

    async def turn(self, ticket: Ticket) -> None:
        """As Ticket.turn."""
        if not ticket.is_known:
            await self._door.turns.wait(ticket, ticket.share)
            return
        self._door.turns.leave(ticket, ticket.share.flow)
        for model in sorted(ticket.sizes):
            await self._gates[model].turns.wait(ticket, ticket.share, ticket.sizes[model])

    @contextmanager
    def resting(self, ticket: Ticket) -> Iterator[None]:
        """Take a ticket that has not grown out of what models count meanwhile, and end its turn."""
        self._unknown[ticket.share.flow] -= 1
        self._door.turns.leave(ticket, ticket.share.flow)
        try:
            yield
        finally:
            self._unknown[ticket.share.flow] += 1

    def fail(self, ticket: Ticket, error: ServeError) -> None:
        """End the ticket's wait for its turn, if it waits."""
        for gate in (self._door, *(self._gates[model] for model in ticket.sizes)):
            gate.turns.fail(ticket, error)

    def stop(self, error: Unavailable) -> None:
        """Admit nobody any more, and end every open request."""
        self._closed = self._stopped = error
        for ticket in list(self._tickets):
            ticket.end(error)

    def end_keys(self, is_good: Callable[[str], bool]) -> None:
        """End every open request whose key is no longer good."""
        for ticket in list(self._tickets):
            if ticket.key_id and not is_good(ticket.key_id):
                ticket.end(Unauthenticated("The key that was sent has expired or was revoked meanwhile."))

    async def drain(self, error: Unavailable, *, seconds: float) -> None:
        """Admit nobody any more, wait so long for the open requests, and end those that are left."""
        self._closed = error
        for patience_s in (seconds, END_S):
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    while self._tickets:
                        self._left.clear()
                        await self._left.wait()
            self.stop(error)

    def check_open(self) -> None:
        """Raise what the router was closed with."""
        if self._closed is not None:
            raise self._closed

    def _gate(self, model: str, room: Room) -> Gate:
        if model not in self._gates:
            self._gates[model] = self._new_gate(max(1, room.num_places), Turns(partial(self._may_begin, model)))
        return self._gates[model]

    def _new_gate(self, num_places: int, turns: Turns) -> Gate:
        """Before anything is measured, a full queue is believed to empty within the longest wait that is borne."""
        return Gate(pace=Pace(num_places / self.settings.max_wait_s, now=self._clock()), turns=turns)

    def _may_begin(self, model: str, flow: str, total: int, own: int) -> bool:
        """Return whether the model's replicas have use for one more request of the flow."""
        room = self._rooms().get(model)
        return is_room(0 if room is None else room.num_slots, part=self._active.part_of(flow), total=total, own=own)

    def _may_pass(self, flow: str, total: int, own: int) -> bool:
        """Return whether some model's replicas have, beside so many requests that may be for the same model."""
        turns = {model: self._gate(model, room).turns for model, room in self._rooms().items()}
        return not turns or any(
            self._may_begin(model, flow, each.num_at_work + total, each.of(flow) + own) for model, each in turns.items()
        )

    def _used_by(self, flow: str) -> int:
        return sum(gate.turns.of(flow) for gate in self._gates.values())

    def _excess(self, model: str, room: Room, share: Share, size: int, unknown: Mapping[str, int]) -> Excess | None:
        """unknown: tickets that count as one sequence each, by flow"""
        gate, num_unknown = self._gate(model, room), sum(unknown.values())
        num_taken = gate.num_inside + num_unknown + room.num_foreign
        num_own = gate.inside[share.flow] + unknown.get(share.flow, 0)
        num_left = self._num_left(room.num_places, share.flow, num_own + size, num_slots=room.num_slots)
        num_missing = num_taken + size - num_left
        if num_missing > 0:
            return Excess(reason=Reason.PLACES, gate=gate, seconds=num_missing / gate.pace.per_s)
        num_ahead = num_unknown + (gate.num_batch if share.priority == BATCH else 0)
        wait_s = min(self._wait_s(gate, room, num_ahead), self._own_wait_s(gate, room, share.flow, num_own))
        too_long_s = wait_s - self.settings.max_wait_s
        return Excess(reason=Reason.WAIT, gate=gate, seconds=too_long_s) if too_long_s > 0 else None

    def _num_left(self, num_places: int, flow: str, num_own: int, *, num_slots: int) -> int:
        """Return how many of all places may be taken if the flow has so many of them.

        num_slots: of the places, which are never kept, as they would stay empty
        """
        part = self._active.part_of(flow)
        is_within = part == 1.0 or num_own <= num_places * part
        num_kept = min(num_places // KEPT_PART, max(0, num_places - num_slots))
        return num_places if is_within else num_places - num_kept

    def _own_wait_s(self, gate: Gate, room: Room, flow: str, num_own: int) -> float:
        """Return the wait behind the flow's own sequences at its share of everything."""
        part = self._active.part_of(flow)
        return max(0.0, num_own + 1 - part * room.num_slots) / (part * gate.pace.per_s)

    def _wait_s(self, gate: Gate, room: Room, num_more: int = 0) -> float:
        """Return the seconds until one more sequence would begin; other routers' sequences go at their own pace.

        num_more: ahead of it besides what is inside and in no class below it
        """
        own = gate.num_inside - gate.num_batch + num_more + 1
        num_ahead = max(0, own + room.num_foreign - room.num_slots)
        return num_ahead * own / (own + room.num_foreign) / gate.pace.per_s

    def _note(self, rooms: Mapping[str, Room], completed: Mapping[str, int] | None = None) -> None:
        """Tell every pace what has happened since the last change."""
        now = self._clock()
        for model, room in rooms.items():
            gate = self._gate(model, room)
            is_busy = gate.num_inside + room.num_foreign >= room.num_slots
            gate.pace.note(now, is_busy=is_busy, num_completed=(completed or {}).get(model, 0))

    def _refused(self, excess: Excess, share: Share) -> Overloaded:
        """Count the refusal, and return it with an appointment."""
        self.refusals[excess.reason] += 1
        gate = excess.gate
        held = gate.inside[share.flow] / gate.num_inside if gate.num_inside else 0.0
        pace_per_s = gate.pace.per_s * max(self._active.part_of(share.flow), held)
        retry_after_s = self._book(gate, share.flow).make(pace_per_s=pace_per_s, excess_s=excess.seconds)
        return Overloaded(
            f"{self._why(excess.reason)}; retry in {retry_after_s} s.", None, {"retry_after_s": retry_after_s}
        )

    def _book(self, gate: Gate, flow: str) -> Appointments:
        books = gate.appointments
        if flow not in books:
            if len(books) >= MAX_BOOKS:
                del books[next(iter(books))]
            books[flow] = Appointments(max_s=MAX_RETRY_S, clock=self._clock, jitter=self._jitter)
        return books[flow]

    def _why(self, reason: Reason) -> str:
        match reason:
            case Reason.OPEN:
                return f"As many requests are being answered as may be at once ({self.settings.max_open_requests})"
            case Reason.PLACES:
                return "The model has fewer places left than the request has sequences"
            case Reason.WAIT:
                return f"The service has more requests than it can begin within {self.settings.max_wait_s:g} s"
