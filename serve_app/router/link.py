"""One router's connection to one replica: gives it requests, and brings every delta to its request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from serve_app.core.backend import Backend
from serve_app.core.cards import ReplicaCard
from serve_app.core.delta import Delta, Frame, PromptReport
from serve_app.core.errors import ReplicaLeaves, ServeError
from serve_app.core.log_context import about
from serve_app.core.names import ModelRef
from serve_app.core.request import GenerationRequest
from serve_app.router.admission import Room
from serve_app.router.calls import Calls, replica_lost

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Receive = Callable[[Delta], None]
"""Takes the deltas of a request."""
QUIET_LOOKS, SILENT_LOOKS = 10, 16
"""Looks without a frame after which a replica gets no new prompts, and after which what it computes goes on elsewhere.
A replica sends a frame every second, four looks; a router that stands still does not look."""
MIN_MEASURED = 64
"""Tokens of a prompt that tell of the pace: below it, most of the time is the way there and back."""
LEARNING = 1 / 16
"""Weight of a new observation."""


@dataclass(slots=True)
class Habits:
    """What requests to one base are like, as averages that follow the last requests.

    bytes_per_token:   of prompts
    prompt_tokens:     of a prompt that had to be computed;  completion_tokens: of a sequence
    trust:             of the tokens that were believed warm, the part that was
    """

    bytes_per_token: float = 4.0
    prompt_tokens: float = 64.0
    completion_tokens: float = 64.0
    trust: float = 1.0

    def learn_prompt(self, guess: Guess, report: PromptReport) -> None:
        """Compare what was guessed of a prompt with what its replica says."""
        num_tokens = report.num_tokens + report.num_dropped_tokens
        if guess.num_bytes and num_tokens:
            self.bytes_per_token += LEARNING * (guess.num_bytes / num_tokens - self.bytes_per_token)
        self.prompt_tokens += LEARNING * (report.num_tokens - report.num_cached_tokens - self.prompt_tokens)
        if guess.num_warm:
            found = min(1.0, report.num_cached_tokens / guess.num_warm)
            self.trust += LEARNING * (found - self.trust)

    def learn_completion(self, num_tokens: int) -> None:
        self.completion_tokens += LEARNING * (num_tokens - self.completion_tokens)


class Guess(NamedTuple):
    """What a router expects of a prompt at the replica that it chose.

    num_bytes:   of the prompt
    num_warm:    of its tokens, believed to be cached there
    num_missing: of its tokens, to be computed there
    """

    habits: Habits
    num_bytes: int = 0
    num_warm: float = 0.0
    num_missing: float = 0.0


class ReplicaLink:
    """Owns the one stream of frames from a replica, the calls to it, and what it is known to hold.

    backend: the way to the replica;  load, num_foreign: as last heard of, the latter are sequences of other routers
    on_lost: called when the replica is gone or is left, but not where a retired link closes by itself
    has_ended: whether the replica itself has ended the stream, as it does where it did not hear of the router
    on_frame: called with each frame before anybody has its deltas
    clock: seconds, monotonic
    """

    def __init__(
        self,
        backend: Backend,
        card: ReplicaCard,
        router_id: str,
        *,
        on_lost: Callable[[], None] = lambda: None,
        on_frame: Callable[[Frame], None] = lambda frame: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.card = card
        self.backend = backend
        self._router_id = router_id
        self._on_lost = on_lost
        self._on_frame = on_frame
        self._registry = Registry(clock)
        self._calls = Calls(backend, router_id, card.replica_id, on_refused=self._forget)
        self._reader: asyncio.Task[None] | None = None
        self.load = card.load
        self.num_foreign = 0
        self._is_retired = False
        self._num_looks = self._num_answers = 0  # since the last frame
        self._moved: list[str] = []  # while it was silent
        self.has_ended = False

    def start(self) -> None:
        """Open the stream. Needs a running event loop."""
        self._reader = self._calls.spawn(self._read())

    @property
    def replica_id(self) -> str:
        return self.card.replica_id

    @property
    def is_open(self) -> bool:
        """Whether it takes new requests."""
        return self._reader is not None and not (self._calls.is_lost or self._is_retired)

    @property
    def is_quiet(self) -> bool:
        """Whether frames are overdue: what another replica can take is not given to this one."""
        return self._num_looks > QUIET_LOOKS

    @property
    def is_deaf(self) -> bool:
        """Whether the stream is silent although the replica answers: the stream has to be opened anew."""
        return self._num_looks > SILENT_LOOKS and self._num_answers > 1

    @property
    def num_outstanding(self) -> int:
        """Sequences submitted here that have not ended."""
        return self._registry.num_outstanding

    @property
    def room(self) -> Room | None:
        """What the replica can hold, None where it does not say. A sequence that runs has a block at the least."""
        model, num_blocks = self.card.model, self.load.num_blocks
        if not model.max_num_sequences:
            return None
        num_slots = min(model.max_num_sequences, num_blocks or model.max_num_sequences)
        return Room(num_slots=num_slots, num_places=num_slots + model.max_waiting, num_foreign=self.num_foreign)

    def refresh(self, card: ReplicaCard) -> None:
        """Take over what the replica says of itself now."""
        self._num_answers += 1
        self.card = card
        if card.load.num_steps >= self.load.num_steps:  # a frame may have passed it on the way
            self.load = card.load

    @property
    def work(self) -> int:
        """Sequences it has, running and waiting, those of other routers included."""
        return self.num_outstanding + self.num_foreign

    @property
    def capacity(self) -> int:
        """What its work is relative to: blocks of its key/value store."""
        return self.load.num_blocks

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of prompts submitted here that were still to be computed when last heard of."""
        return self._registry.num_prompt_tokens

    @property
    def pace(self) -> float | None:
        """Prompt tokens that it computes per second, as measured here; None before the first."""
        return self._registry.pace

    def submit(
        self, requests: Sequence[GenerationRequest], receive: Receive, guesses: Sequence[Guess] = ()
    ) -> asyncio.Task[ServeError | bool]:
        """Give requests to the replica; the task ends as `Backend.submit`, or with the error that refused them all.

        They are registered and counted before this returns: deltas may come before the answer does.
        guesses: what the router expects of each prompt there
        Cancelling whoever awaits the task is safe, a later `abort` waits for it.
        """
        self._registry.add(requests, receive, guesses)
        return self._calls.submit(requests)

    def abort(self, request_ids: Sequence[str]) -> asyncio.Task[bool]:
        """Dispatch no delta of these requests from now on, and tell the replica in the background."""
        names = self._registry.names_of(request_ids)
        self._forget(request_ids)
        return self._calls.abort(request_ids, names)

    def pause(self, request_ids: Sequence[str]) -> asyncio.Task[bool]:
        """Have the replica compute nothing more of these requests until `resume`; tell it in the background."""
        return self._calls.tell(self.backend.pause, request_ids, self._registry.names_of(request_ids))

    def resume(self, request_ids: Sequence[str]) -> asyncio.Task[None]:
        """Have the replica go on with what was paused. Where it cannot be told, the requests are lost: they would
        wait for ever."""
        telling = self._calls.tell(self.backend.resume, request_ids, self._registry.names_of(request_ids))
        return self._calls.spawn(self._resume(telling, request_ids))

    async def ask(self, call: Coroutine[object, object, Result]) -> Result:
        """As `Calls.ask`."""
        return await self._calls.ask(call)

    def retire(self) -> None:
        """Take no new requests, and close once those that run have ended."""
        self._is_retired = True
        self._close_if_idle()

    def look(self) -> bool:
        """Count a look; whether the replica is silent: nobody waits for it who need not."""
        self._num_looks += 1
        if self._num_looks == SILENT_LOOKS + 1 and self.is_open:
            facts = (self.replica_id, self.num_outstanding)
            logger.warning("replica %s is silent, with %d sequences", *facts, extra=about(self._registry.names_of()))
        if is_silent := self._num_looks > SILENT_LOOKS:
            self._calls.give_up()
        return is_silent

    def hand_over(self, can_go_on: Callable[[ModelRef], bool]) -> None:
        """Have requests go on elsewhere, of models for which that can be, and compute nothing more of them here."""
        if moved := self._registry.of(can_go_on):
            names = self._registry.names_of(moved)
            self._calls.abort(moved, names)
            self._moved += moved if self.is_quiet else ()
            self._registry.lose(lambda: ReplicaLeaves("The replica that computed the request leaves."), moved)
            self._close_if_idle()

    def drop(self, reason: str) -> None:
        """Leave the stream; what still runs there ends with ReplicaLost. reason: as of `replica_lost`"""
        if self._reader is not None:
            self._reader.cancel()
        self._lose(reason)

    def readmit(self) -> bool:
        """Take requests again after `retire`; False where the link is closed already."""
        self._is_retired = self._calls.is_lost
        return self.is_open

    async def close(self) -> None:
        """Leave the replica; what still runs there ends with ReplicaLost."""
        self._is_retired = True
        self.drop("was disconnected by the router")
        await self._calls.finish()

    async def _read(self) -> None:
        reason = "was disconnected by the router"
        try:
            async with aclosing(self.backend.attach(self._router_id)) as frames:
                async for frame in frames:
                    self._receive(frame)
            reason, self.has_ended = "ended its stream", True
        except Exception as error:
            reason = "went away"
            extra = about(self._registry.names_of())
            logger.warning("replica %s went away: %r", self.replica_id, error, extra=extra)
        finally:
            self._lose(reason)

    def _receive(self, frame: Frame) -> None:
        self._num_looks = self._num_answers = 0
        if self._moved:  # it may have heard nothing of that
            self._calls.abort(self._moved)
            self._moved = []
        self._on_frame(frame)
        for delta in frame.deltas:
            self._registry.dispatch(delta)
        self.load = frame.load
        self.num_foreign = max(0, frame.load.num_running + frame.load.num_waiting - self.num_outstanding)
        self._close_if_idle()

    async def _resume(self, telling: asyncio.Task[bool], request_ids: Sequence[str]) -> None:
        if not await telling:
            self._registry.lose(lambda: replica_lost("could not be told to go on"), request_ids)
            self._close_if_idle()

    def _forget(self, request_ids: Sequence[str]) -> None:
        self._registry.forget(request_ids)
        self._close_if_idle()

    def _lose(self, reason: str) -> None:
        if self._calls.is_lost:
            return
        self._calls.is_lost = True
        lost = self._registry.lose(lambda: replica_lost(reason))
        if lost and self.has_ended:
            self._calls.abort(lost)  # it may have taken them behind the end of its stream
        self._on_lost()

    def _close_if_idle(self) -> None:
        if self._is_retired and not self.num_outstanding and not self._calls.is_lost and self._reader is not None:
            self._calls.is_lost = True
            self._reader.cancel()


@dataclass(slots=True)
class Registration:
    """Where the deltas of a request go, what its client knows it by, and how many of its sequences have not ended.

    guess: what was expected of its prompt; num_prompt_tokens: of it, still to be computed as far as is known
    submitted_at: by the registry's clock, seconds; None where its deltas are gathered, and so tell no time
    """

    client_request_id: str
    receive: Receive
    model: ModelRef
    num_unfinished: int
    guess: Guess | None = None
    num_prompt_tokens: int = 0
    submitted_at: float | None = None


class Registry:
    """The requests of one link. A request leaves it with its last sequence, or when it is forgotten.

    num_prompt_tokens: of prompts of which nothing was heard;  num_outstanding: sequences that have not ended
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live: dict[str, Registration] = {}
        self.num_outstanding = 0
        self._num_measured = self._measured_s = 0.0
        self.num_prompt_tokens = 0

    @property
    def pace(self) -> float | None:
        """Prompt tokens per second, from the first step of a prompt to its first delta; None before the first."""
        return self._num_measured / self._measured_s if self._measured_s else None

    def of(self, is_wanted: Callable[[ModelRef], bool]) -> list[str]:
        """The requests for such models."""
        return [request_id for request_id, each in self._live.items() if is_wanted(each.model)]

    def names_of(self, request_ids: Iterable[str] | None = None) -> list[str]:
        """What clients know these requests by, or all of them; of those that are not here nothing is known."""
        found = (self._live.get(each) for each in (self._live if request_ids is None else request_ids))
        return [each.client_request_id for each in found if each is not None]

    def add(self, requests: Sequence[GenerationRequest], receive: Receive, guesses: Sequence[Guess] = ()) -> None:
        for request, guess in zip_longest(requests, guesses):
            assert request.request_id not in self._live, f"{request.request_id} was given twice"
            num_prompt_tokens = 0 if guess is None else int(guess.num_missing)
            self._live[request.request_id] = Registration(
                client_request_id=request.client_request_id,
                receive=receive,
                model=request.model,
                num_unfinished=len(request.samples),
                guess=guess,
                num_prompt_tokens=num_prompt_tokens,
                submitted_at=None if request.is_read_whole else self._clock(),
            )
            self.num_outstanding += len(request.samples)
            self.num_prompt_tokens += num_prompt_tokens

    def dispatch(self, delta: Delta) -> None:
        """Bring a delta to its request; one of a request that was forgotten is dropped."""
        registration = self._live.get(delta.request_id)
        if registration is None:
            return
        if delta.prompt is not None:
            self._learn(registration, delta.prompt)
        self.num_prompt_tokens -= registration.num_prompt_tokens  # it is computed, also where it is not reported again
        registration.num_prompt_tokens = 0
        if delta.finish is not None or delta.error is not None:
            if delta.finish is not None and registration.guess is not None:
                registration.guess.habits.learn_completion(delta.finish.num_tokens)
            registration.num_unfinished -= 1
            self.num_outstanding -= 1
            if registration.num_unfinished == 0:
                self._leave(delta.request_id)
        registration.receive(delta)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Dispatch nothing more to these; those unknown are left alone."""
        for request_id in request_ids:
            registration = self._leave(request_id)
            if registration is not None:
                self.num_outstanding -= registration.num_unfinished

    def lose(self, error_of: Callable[[], ServeError], request_ids: Sequence[str] | None = None) -> list[str]:
        """Forget requests, all of them where none is named, and send each a delta with an error of its own.

        Returns those that were there.
        """
        lost = list(self._live) if request_ids is None else [each for each in request_ids if each in self._live]
        receivers = {request_id: self._live[request_id].receive for request_id in lost}
        self.forget(lost)
        for request_id, receive in receivers.items():
            receive(Delta(request_id=request_id, sample=0, error=error_of()))
        return lost

    def _leave(self, request_id: str) -> Registration | None:
        registration = self._live.pop(request_id, None)
        if registration is not None:
            self.num_prompt_tokens -= registration.num_prompt_tokens
        return registration

    def _learn(self, registration: Registration, report: PromptReport) -> None:
        """Note how much of the prompt was computed, and how long that took."""
        if registration.guess is not None:
            registration.guess.habits.learn_prompt(registration.guess, report)
        num_computed = report.num_tokens - report.num_cached_tokens
        if num_computed >= MIN_MEASURED and registration.submitted_at is not None:
            seconds = max(0.0, self._clock() - registration.submitted_at - report.queue_s)
            self._num_measured += num_computed - LEARNING * self._num_measured
            self._measured_s += seconds - LEARNING * self._measured_s
