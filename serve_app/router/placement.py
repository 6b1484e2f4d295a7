"""Chooses a replica for each prompt.

A replica's cost for a prompt, in seconds:

    (RECOMPUTE * tokens to compute there + tokens that wait there) / its pace + loads of adapters that it lacks

The cheapest one gets the prompt. Replicas that cost about the same are chosen by a hash of the prompt or the adapter,
so that routers agree without talking. While a replica idles, none gets more than 1.25 times its share of the work.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from statistics import median
from typing import Literal, NamedTuple

from serve_app.core.cards import ReplicaCard, Residency
from serve_app.core.prefixes import ENDS, Prefixes, prefixes_of
from serve_app.core.request import GenerationRequest
from serve_app.router.link import Guess, Habits, ReplicaLink

PlacementPolicy = Literal["warm", "least_work", "power_of_two", "random"]

RECOMPUTE = 2.0
"""A token that is computed costs the time of its request, and as much of those that come after it."""
SLACK = 1 / 8
"""Replicas cost about the same if they differ by this part of what the prompt alone costs."""
BOUND = 1.25
"""Of a replica's share of the work."""
FEW = 4
"""Sequences that a replica may always have: one step computes them all, so none of them waits."""
TOKENS_PER_S = 1000.0
"""The pace of replicas before any is measured."""
SAME_PACE = 2.0
"""Replicas within this factor of the middle pace count as equally fast: company and chance slow a measurement."""


@dataclass(slots=True)
class Given:
    """What a request has given to a replica so far."""

    work: int = 0
    tokens: float = 0.0


NOTHING = Given()


class Offer(NamedTuple):
    """What a prompt costs at a replica, in seconds: own_s without what waits there."""

    replica: ReplicaLink
    guess: Guess
    own_s: float
    cost_s: float


class Placement:
    """The choices of one router, and what they rest on. Belongs to the fleet, so it outlives changes of settings.

    policy: `warm` as above; `least_work` takes the fewest sequences for a replica's size, `power_of_two` the better one
            of two random replicas by that measure, `random` any
    """

    def __init__(self, policy: PlacementPolicy = "warm", *, random: Random | None = None) -> None:
        self.policy = policy
        self.warmth = Warmth()
        self.random = random or Random()  # nosec B311 # no secret hangs on it
        self.turn = 0
        self._habits: dict[str, Habits] = {}

    def habits_of(self, base: str) -> Habits:
        return self._habits.setdefault(base, Habits())

    def begin(self) -> Round:
        """Place one client's request, prompt by prompt."""
        return Round(self)


@dataclass(slots=True)
class Round:
    """One request while its prompts are placed. Each choice counts what was given before it."""

    placement: Placement
    given: dict[str, Given] = field(default_factory=dict)

    def choose(self, request: GenerationRequest, replicas: Sequence[ReplicaLink]) -> tuple[ReplicaLink, Guess]:
        """Return the replica for a prompt, and what is expected of it there. `replicas` are one at least."""
        habits = self.placement.habits_of(request.model.base)
        turn = self.placement.turn % len(replicas)
        in_turn = [*replicas[turn:], *replicas[:turn]]  # the first of equals is taken
        guess = Guess(habits)
        match self.placement.policy:
            case "warm":
                replica, guess = self._warmest(request, in_turn, habits)
            case "least_work":
                replica = self._idlest(in_turn)
            case "power_of_two":
                replica = self._idlest(self.placement.random.sample(in_turn, min(2, len(in_turn))))
            case "random":
                replica = self.placement.random.choice(in_turn)
        given = self.given.setdefault(replica.replica_id, Given())
        given.work += request.n
        given.tokens += guess.num_missing + request.n * habits.completion_tokens
        self.placement.turn = replicas.index(replica) + 1
        return replica, guess

    def _idlest(self, replicas: Sequence[ReplicaLink]) -> ReplicaLink:
        """Return the replica with the fewest sequences for its size."""
        return min(replicas, key=lambda each: (each.work + self._given(each).work) / max(1, each.capacity))

    def _warmest(
        self, request: GenerationRequest, replicas: Sequence[ReplicaLink], habits: Habits
    ) -> tuple[ReplicaLink, Guess]:
        """Return the replica where the prompt costs least, by `offers`, and remember what it will hold."""
        prefixes, warmth = prefixes_of(request), self.placement.warmth
        versions = tuple(part.version for part in request.model.parts)
        offers = self._offers(prefixes, versions, within_bound(replicas, request.n), habits)
        best = min(offers, key=lambda offer: offer.cost_s)
        key = _key_of(prefixes.names, request.model.version)
        if key:
            most = best.cost_s + SLACK * best.own_s
            equals = [offer for offer in offers if offer.cost_s <= most]
            best = max(equals, key=lambda offer: _weight(key, offer.replica.replica_id))
        warmth.hold(best.replica.replica_id, prefixes.names, versions)
        return best.replica, best.guess

    def _offers(
        self, prefixes: Prefixes, versions: Sequence[str], replicas: Sequence[ReplicaLink], habits: Habits
    ) -> list[Offer]:
        """Return what a prompt costs at each replica."""
        warmth, num_tokens = self.placement.warmth, prefixes.num_bytes / habits.bytes_per_token
        depths = warmth.depths(prefixes.names, [each.replica_id for each in replicas])
        paces = even_paces([each.pace for each in replicas])
        offers = []
        for replica, depth, pace in zip(replicas, depths, paces, strict=True):
            num_warm = depth / habits.bytes_per_token
            num_missing = num_tokens - habits.trust * num_warm
            own_s = RECOMPUTE * num_missing / pace + warmth.load_s(replica.replica_id, versions)
            queue_s = (queued(replica, habits) + self._given(replica).tokens) / pace
            guess = Guess(habits, prefixes.num_bytes, num_warm, num_missing)
            offers.append(Offer(replica, guess, own_s, own_s + queue_s))
        return offers

    def _given(self, replica: ReplicaLink) -> Given:
        return self.given.get(replica.replica_id, NOTHING)


def queued(replica: ReplicaLink, habits: Habits) -> float:
    """Return the tokens that a replica has to compute, as far as can be known here."""
    return (
        replica.num_prompt_tokens + replica.num_foreign * habits.prompt_tokens + replica.work * habits.completion_tokens
    )


def within_bound(replicas: Sequence[ReplicaLink], size: int) -> Sequence[ReplicaLink]:
    """Return the replicas that may get so many more sequences: all, or while one idles those near their share."""
    if all(each.work for each in replicas):
        return replicas
    total = BOUND * (sum(each.work for each in replicas) + size) / sum(max(1, each.capacity) for each in replicas)
    bounds = [max(FEW, math.ceil(total * max(1, each.capacity))) for each in replicas]
    return [each for each, most in zip(replicas, bounds, strict=True) if each.work + size <= most] or replicas


def even_paces(paces: Sequence[float | None]) -> list[float]:
    """Return the pace of each replica; those near the middle one, and those not measured, count as equal to it."""
    middle = median([pace for pace in paces if pace is not None] or [TOKENS_PER_S])
    return [middle if pace is None or middle / SAME_PACE <= pace <= middle * SAME_PACE else pace for pace in paces]


def _key_of(names: Sequence[bytes], version: str) -> bytes:
    """Return what a prompt is placed by among equals: its beginning, else its adapter; b"" where it has neither.

    Prompts that differ only near their ends have the same one, as it ends at a power of two of their names.
    """
    return names[(1 << (len(names).bit_length() - 1)) - 1] if names else version.encode()[:64]


def _weight(key: bytes, replica_id: str) -> bytes:
    """Return a replica's rank for a key (rendezvous hashing)."""
    return blake2b(replica_id.encode(), key=key, digest_size=8).digest()


MAX_NAMES = 1 << 17
"""Of prefixes; about 20 MiB, and 6000 documents of 2000 tokens."""
MAX_GONE = 64
"""Replicas that left until the table is swept of them, which takes about 60 ms."""
LOAD_S = 0.2
"""An adapter's load takes so long, until a replica says how long its loads took."""


class Warmth:
    """What a router sent to replicas, and what they told it; the least recently used prefixes are forgotten.

    Each name has one bit per replica, and a replica that has a prefix has all shorter ones. So one walk along a
    prompt's names finds how much of it each replica holds.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._holders: OrderedDict[bytes, int] = OrderedDict()
        self._bits: dict[str, int] = {}
        self._gone = 0  # bits of replicas that left, still in the table
        self._adapters: defaultdict[str, HeldAdapters] = defaultdict(HeldAdapters)

    def hear(self, card: ReplicaCard) -> None:
        """Take in what a replica says: prefixes that other routers sent it, and its adapters."""
        self.hold(card.replica_id, card.prefixes)
        self._adapters[card.replica_id].hear(card.residency)

    def hold(self, replica_id: str, names: Sequence[bytes], versions: Iterable[str] = ()) -> None:
        """Note that a replica has these prefixes and adapter versions, or will have them when it has computed."""
        bit, holders = self._bit(replica_id), self._holders
        for name in reversed(names):  # a shorter prefix is forgotten after the longer ones
            holders[name] = holders.get(name, 0) | bit
            holders.move_to_end(name)
        while len(holders) > self._max_names:
            holders.popitem(last=False)
        if versions:
            self._adapters[replica_id].sent.update(versions)

    def forget(self, replica_id: str) -> None:
        """Forget a replica that is gone."""
        self._adapters.pop(replica_id, None)
        self._gone |= self._bits.pop(replica_id, 0)
        if self._gone.bit_count() >= MAX_GONE:
            left = ((name, holders & ~self._gone) for name, holders in self._holders.items())
            self._holders = OrderedDict((name, holders) for name, holders in left if holders)
            self._gone = 0

    def depths(self, names: Sequence[bytes], replica_ids: Sequence[str]) -> list[int]:
        """Return how many bytes of a prompt with these names each of the replicas holds."""
        levels: list[tuple[int, int]] = []  # whoever holds so many bytes, the deepest last
        holders = -1
        for name, end in zip(names, ENDS, strict=False):
            holders &= self._holders.get(name, 0)
            if not holders:
                break
            if levels and levels[-1][0] == holders:
                levels.pop()
            levels.append((holders, end))
        bits = [self._bits.get(replica_id, 0) for replica_id in replica_ids]
        return [next((end for holders, end in reversed(levels) if holders & bit), 0) for bit in bits]

    def load_s(self, replica_id: str, versions: Sequence[str]) -> float:
        """Return the seconds that loads of those adapters cost which the replica does not hold.

        Where all slots are taken, each load costs another one: somebody has to load what is evicted again.
        """
        return self._adapters[replica_id].load_s(versions) if versions else 0.0

    def _bit(self, replica_id: str) -> int:
        """Return the replica's bit; a new one gets the lowest that is free."""
        if replica_id not in self._bits:
            taken = sum(self._bits.values()) + self._gone
            self._bits[replica_id] = ~taken & (taken + 1)
        return self._bits[replica_id]


class HeldAdapters:
    """The adapters of one replica: as it told them last, and those sent since the card before that.

    What was sent while the last card was on its way is not on it.
    """

    def __init__(self) -> None:
        self._told = Residency()
        self._sent_before: set[str] = set()
        self.sent: set[str] = set()

    def hear(self, told: Residency) -> None:
        """Take over what the replica says now."""
        self._told, self._sent_before, self.sent = told, self.sent, set()

    def load_s(self, versions: Iterable[str]) -> float:
        """Return as `Warmth.load_s`."""
        held = {*self._told.versions, *self._sent_before, *self.sent}
        num_missing = sum(version not in held for version in versions)
        is_full = 0 < self._told.num_slots <= len(held)
        return num_missing * (self._told.load_s or LOAD_S) * (2 if is_full else 1)
