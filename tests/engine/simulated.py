"""The real scheduler over a store without contents: steps that cost what a price list says, on a clock of their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any, cast

from serve_app.core.delta import Finish, FinishReason
from serve_app.core.shares import Share
from serve_app.engine.config import SPARE_PART
from serve_app.engine.kv.storage import Storage
from serve_app.engine.kv.store import KeyValueStore
from serve_app.engine.lora.slots import Slots
from serve_app.engine.scheduler.accounting import Accounts, attribute
from serve_app.engine.scheduler.planner import Pace
from serve_app.engine.scheduler.policy import NONE_BEYOND, Beyond, Claim, FairShares, Key, Rules, divided
from serve_app.engine.scheduler.queue import WaitingQueue
from serve_app.engine.scheduler.scheduler import Scheduler
from serve_app.engine.scheduler.sequence import Batch, Sequence
from tests.engine.harness import request


class NoContents:
    """A storage of blocks in which nothing is."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Seconds of a step: of itself, of each token of a prompt, of each that decodes."""

    step_s: float = 0.010
    prompt_s: float = 0.0001
    decode_s: float = 0.0002

    def of(self, batch: Batch) -> float:
        return self.step_s + self.prompt_s * batch.num_prompt_tokens + self.decode_s * batch.num_decoding


@dataclass(slots=True)
class Story:
    """What became of one request; times on the simulated clock."""

    flow: str
    asked_at: float
    first_at: float | None = None
    ended_at: float | None = None


class NoPace(Pace):
    """All that fits is allowed, so that steps do not depend on what others took."""

    def allowance(self, num_decoding: int, budget: int, *, behind: Items[int] = (), is_shared: bool = False) -> int:
        return budget

    def rows(self, num_level: int, num_beyond: int, *, is_shared: bool = False) -> int:
        return num_beyond


class FirstCome(FairShares):
    """The plain reference: first come, first served, whoever asks."""

    def line_of(self, share: Share) -> Hashable:
        return ()

    def turn_key(self, share: Share, *, owed: float, since: float, is_kept: bool, number: int, now: float) -> Key:
        return 0, 0.0, number

    def divide(self, claims: Items[Claim], amount: int) -> list[int]:
        return divided(claims, amount, price=0.0, lump=max(amount, 1))

    def rows(self, decoding: Items[Share], allowed: Callable[[int, int], int]) -> tuple[set[int], Beyond]:
        return set(), NONE_BEYOND

    def victim(self, running: Items[Share]) -> int:
        return len(running) - 1

    def giver(
        self, running: Items[Share], debts: Items[float], claimant: Share, *, resumes: Callable[[int], bool]
    ) -> int | None:
        return None

    def may_take_spare(self, running: Items[Share], owed: Mapping[str, float], claimant: Share) -> bool:
        return False


@dataclass
class Simulation:
    """Steps of a scheduler whose sequences generate as many tokens as they were asked for.

    num_places: without those that are spare, of which there are as many as an engine has
    stretch: how many times as long as its price a step takes
    """

    rules: Rules = field(default_factory=Rules)
    num_places: int = 16
    has_spare: bool = True
    num_blocks: int = 4096
    max_batch_tokens: int = 256
    num_slots: int = 4
    max_bypass_s: float = 5.0
    prices: Prices = field(default_factory=Prices)
    stretch: float = 1.0
    prefix_cache: bool = False
    pace: Pace = field(default_factory=lambda: NoPace(2.0))
    queue_kind: type[WaitingQueue] = WaitingQueue
    policy_kind: Callable[[Rules], FairShares] = FairShares

    def __post_init__(self) -> None:
        self.now = 0.0
        clock = lambda: self.now  # noqa: E731
        self.policy, self.accounts = self.policy_kind(self.rules), Accounts(lambda: int(self.now * 1e9))
        num_spare = self.num_places // SPARE_PART if self.has_spare else 0
        self.store = KeyValueStore(
            cast(Storage, NoContents()), num_blocks=self.num_blocks, block_size=16,
            num_places=self.num_places + num_spare, num_spare=num_spare,
        )  # fmt: skip
        self.slots = Slots(self.num_slots, lambda slot, version: None)
        self.waiting = self.queue_kind(self.policy, clock=clock)
        self.scheduler = Scheduler(
            self.store, self.slots, policy=self.policy, accounts=self.accounts, waiting=self.waiting,
            max_batch_tokens=self.max_batch_tokens, max_logit_rows=64, pace=self.pace,
            max_bypass_s=self.max_bypass_s, uses_prefixes=self.prefix_cache, clock=clock,
        )  # fmt: skip
        self.stories: dict[str, Story] = {}
        self.num_steps = self.num_tokens = 0
        self.served: dict[str, float] = {}

    def ask(
        self, share: Share, prompt_length: int, max_tokens: int, *, adapter: str | None = None, salt: int = 0
    ) -> Sequence:
        """A request whose prompt no other one shares, unless they have a `salt` in common."""
        name = f"{share.flow}/{len(self.stories)}"
        asked = replace(request(name, max_tokens=max_tokens, adapter=adapter), share=share)
        first = salt or len(self.stories) + 1000
        sequence = Sequence(
            asked, [first] * prompt_length, sample=0, max_tokens=max_tokens, detokenizer=cast(Any, None)
        )
        sequence.place.arrived_at = self.now
        self.stories[name] = Story(share.flow, self.now)
        self.waiting.push(sequence)
        return sequence

    def step(self) -> Batch:
        """One step; the clock goes on by what it takes, also where nothing can be computed."""
        began_ns = int(self.now * 1e9)
        self.slots.poll()
        batch = self.scheduler.schedule()
        step_s = self.prices.of(batch) * self.stretch
        self.now += step_s
        if batch:
            self.scheduler.pace.note(batch.num_decoding, batch.num_prompt_tokens, step_s, beyond=batch.beyond)
            self.num_steps += 1
            attribute(batch, self.policy, self.accounts, since_ns=began_ns)
        self.compute(batch)
        return batch

    def compute(self, batch: Batch) -> None:
        """As if a model had: tokens are drawn, sequences end."""
        for span in batch.spans:
            self.num_tokens += span.length
            self._note_service(span.sequence.request.share.flow, span.length - span.decodes, span.samples)
            self._compute(span.sequence, span.end, samples=span.samples)

    def run(self, num_steps: int, each: Callable[[], None] = lambda: None) -> None:
        for _ in range(num_steps):
            each()
            self.step()
            self.scheduler.check_integrity()

    def drain(self, *, max_steps: int = 100_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("still at work")

    def num_waiting(self, flow: str) -> int:
        return sum(each.request.share.flow == flow for each in self.waiting)

    def service_of(self, flow: str) -> float:
        """What a flow was charged so far."""
        return sum(each.service for each in self.accounts.report().flows if each.flow == flow)

    def first_token_s(self, flows: Iterable[str]) -> list[float]:
        """Of all requests of these flows that have a first token."""
        wanted = set(flows)
        return sorted(
            story.first_at - story.asked_at
            for story in self.stories.values()
            if story.flow in wanted and story.first_at is not None
        )

    def _note_service(self, flow: str, num_prompt: int, samples: bool) -> None:
        """By the definition, beside the counters: tokens of prompts and drawn ones, weighted."""
        service = self.rules.prefill_weight * num_prompt + self.rules.decode_weight * samples
        self.served[flow] = self.served.get(flow, 0.0) + service

    def _compute(self, sequence: Sequence, end: int, *, samples: bool) -> None:
        sequence.num_computed = end
        story = self.stories[sequence.request.request_id]
        if samples:
            sequence.token_ids.append(7)
            story.first_at = story.first_at or self.now
        if sequence.is_prompt_computed and not sequence.place.is_prompt_published:
            self.scheduler.publish(sequence)
        if sequence.num_generated >= sequence.max_tokens:
            story.ended_at = self.now
            sequence.finish = Finish(reason=FinishReason.LENGTH, matched_stop=None, num_tokens=sequence.num_generated)
            self.scheduler.release(sequence)


def percentile(values: Items[float], of_hundred: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * of_hundred // 100)]
