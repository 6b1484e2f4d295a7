"""One client's request while it runs: its prompts on their replicas, their deltas in one stream."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, Self, TypeVar

from serve_app.core.bounded import Amount, PositiveFloat, PositiveInt
from serve_app.core.delta import Delta
from serve_app.core.errors import (
    AdapterNotFound,
    AdapterUnusable,
    DeadlineExceeded,
    EngineFailed,
    ModelLoading,
    Overloaded,
    ReplicaLeaves,
    ReplicaLost,
    ServeError,
)
from serve_app.core.names import ModelRef
from serve_app.core.progress import Past, Progress
from serve_app.core.request import GenerationRequest, StopParams
from serve_app.router.fleet import ALL_LOST, Fleet
from serve_app.router.inbox import Event, Inbox
from serve_app.router.link import Guess, ReplicaLink
from serve_app.router.stats import RunStats

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What one request may take of time, of replicas, and of patience with its reader.

    timeout_s:          how long one request may take in all
    max_placements:     replicas that a prompt is given to before its loss is the client's, of those that tell nothing
                        new of it; planned moves do not count
    max_pause_s:        how long a prompt whose replica was lost waits until something new is told of it, seconds
    max_pending_events: events of a stream that wait for a slow client, or four steps of every choice if that is more
    slow_reader:        what happens beyond that: `pause` has the engine wait, `abort` ends the stream with an error
    """

    timeout_s: PositiveFloat = 600.0
    max_placements: PositiveInt = 3
    max_pause_s: Amount = 60.0
    max_pending_events: PositiveInt = 1024
    slow_reader: Literal["pause", "abort"] = "pause"


class Run:
    """Use as `async with run: async for event in run: …`.

    Entering submits every prompt; one refusal refuses all and is raised. The iterator raises the first error that
    comes and otherwise ends when every choice has ended. Leaving aborts what has not ended: it never waits, so a
    cancellation cannot skip it.

    A prompt whose replica is lost goes on at another one, where it stopped.

    resolve: says what a name means now to whom the run is for
    is_refused: by a replica;  is_resumed: another run had begun with it
    is_kept: replicas keep all of it, so that its client can fetch it anew
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        response_id: str,
        *,
        fleet: Fleet,
        settings: RunSettings | None = None,
        resolve: Callable[[str], object] | None = None,
    ) -> None:
        self.response_id = self._name = response_id
        self._resolve = resolve or fleet.resolve
        self.requests = tuple(requests)
        self.stats = RunStats()
        self._fleet = fleet
        self._settings = settings or RunSettings()
        self._progress = [Progress(request) for request in self.requests]
        self._attempts: dict[str, Attempt] = {}  # those that run, by the id of their request
        self._homeless: list[Homeless] = []
        self._lost: set[ReplicaLink] = set()
        self._failed: set[ReplicaLink] = set()
        self._num_unended = sum(request.n for request in requests)
        max_pending = max(self._settings.max_pending_events, 4 * self._num_unended)
        is_read_whole = all(request.is_read_whole for request in self.requests)
        self._inbox = Inbox(None if is_read_whole else max_pending, on_full=self._pause, on_slack=self._resume)
        self._accepted: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ends_at = time.monotonic() + self._settings.timeout_s
        self._has_left = self.is_refused = self.is_resumed = False
        self._numerics = [""] * len(self.requests)
        self.is_kept = all(request.kept is not None for request in self.requests)

    def go_on(self, pasts: Sequence[Past]) -> None:
        """Before it is entered: tell again what is known of what another run told of each prompt, and go on there."""
        self._name, self.is_resumed = f"{self.response_id}~{secrets.token_hex(4)}", True
        self._numerics = [past.numerics for past in pasts]
        for part, past in enumerate(pasts):
            for delta in past.deltas:
                self._take(part, delta)
        counted = [sum([each.num_counted for each in past.request.continued if each is not None]) for past in pasts]
        self.stats.note_past(counted)

    @property
    def unended(self) -> set[ModelRef]:
        """The models of prompts of which something is still to be computed."""
        return {
            each.model for each, progress in zip(self.requests, self._progress, strict=True) if not progress.has_ended
        }

    @property
    def has_ready(self) -> bool:
        """Whether the next event is there already."""
        return len(self._inbox) > 0

    @property
    def num_finished(self) -> dict[str, int]:
        """Completions that have ended, by base."""
        return {base: stats.num_finished for base, stats in self._stats_by(lambda each: each.model.base).items()}

    @property
    def stats_by_model(self) -> dict[ModelRef, RunStats]:
        """What each model's part came to."""
        return self._stats_by(lambda request: request.model)

    async def in_turn(self, turn: Awaitable[None]) -> None:
        """Wait for the run's turn to start. Raises DeadlineExceeded where that takes all the time it has."""
        try:
            async with asyncio.timeout(self._seconds_left):
                await turn
        except TimeoutError:
            raise self._too_late() from None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        since = time.monotonic() if self.is_resumed else None
        try:
            self._accepted = loop.create_future()
            self._timer = loop.call_later(self._seconds_left, self._expire)
            self._homeless = [
                Homeless(request=request, part=part, numerics=self._numerics[part], since=since)
                for part, request in enumerate(self.requests)
                if not self._progress[part].has_ended
            ]
            if self._homeless:
                self._settle()
                await self._accepted
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await self.next_event()
        if event is None:
            raise StopAsyncIteration
        return event

    async def next_event(self) -> Event | None:
        """None at the end. Raises the first error that comes."""
        if not self._num_unended:
            return None
        arrival = await self._inbox.take()
        if isinstance(arrival, ServeError):
            raise arrival
        self._num_unended -= arrival.delta.finish is not None
        return arrival

    def token_ids(self, part: int, *, most: int) -> tuple[int, ...]:
        """Return the first tokens of a prompt's first completion."""
        return self._progress[part].token_ids(0, most=most)

    def fail(self, error: ServeError) -> None:
        """End the run: what is ready is still read, then comes the error."""
        if self._accepted is not None and not self._accepted.done():
            self._accepted.set_exception(error)
        else:
            self._inbox.put(error)

    def end(self, error: ServeError) -> None:
        """Fail, and have nothing more computed."""
        self.fail(error)
        self._abort_all()

    def _settle(self) -> None:
        """Give every homeless prompt to a replica; tell whoever enters once every replica has accepted its own."""
        if self._has_left:
            return
        homeless, self._homeless = self._homeless, []
        try:
            for link, share in self._place(homeless).items():
                self._submit(link, share)
        except ModelLoading as error:
            self._wait_or_fail(homeless, error)
        except ServeError as error:
            self.fail(error)

    def _wait_or_fail(self, homeless: Sequence[Homeless], error: ModelLoading) -> None:
        """Wait for another replica where anything was told already; else the client is told to come again."""
        has_begun = any(each.has_begun for each in self._progress)  # what has not waits with what has
        if not has_begun or not all(self._may_wait(each.since) for each in homeless):
            self.fail(self._withdrawn(homeless) or error)
            return
        if not self._homeless:
            asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._settle)
        self._homeless += homeless

    def _withdrawn(self, homeless: Sequence[Homeless]) -> ServeError | None:
        """Return the error of a name that was withdrawn on the prompts' way: no replica will have it."""
        for each in homeless:
            try:
                self._resolve(self.requests[each.part].model.name)
            except ModelLoading:
                continue
            except ServeError as error:
                return error
        return None

    def _may_wait(self, since: float | None) -> bool:
        """Whether a prompt that was lost then still has time to wait for a replica."""
        return since is not None and time.monotonic() - since < self._settings.max_pause_s

    def _submit(self, link: ReplicaLink, share: Sequence[tuple[Homeless, Guess]]) -> None:
        begun = [(each, self.requests[each.part].stop.after(self.stats.elapsed_s(each.part))) for each, _ in share]
        attempts = [each.on(link, self._name, self._progress[each.part], stop) for each, stop in begun]
        self._attempts |= {attempt.request.request_id: attempt for attempt in attempts}
        self.stats.place([attempt.part for attempt in attempts], link.replica_id)
        guesses = [guess for _, guess in share]
        submission = link.submit([attempt.request for attempt in attempts], self._receive, guesses)
        submission.add_done_callback(lambda done: self._note_answer(attempts, done))
        if self._inbox.is_full:
            link.pause([attempt.request.request_id for attempt in attempts])

    def _note_answer(self, attempts: Sequence[Attempt], submission: asyncio.Task[ServeError | bool]) -> None:
        if self._has_left or submission.cancelled():
            return
        for attempt in attempts:
            attempt.is_taken = True
        answer = submission.result()
        if isinstance(answer, ServeError):
            self.is_refused |= not isinstance(answer, ReplicaLost)
            for attempt in attempts:
                self._lose(attempt, self.told((each.request.model for each in attempts), answer))
        else:
            self.is_kept &= answer
        is_accepted = not self._homeless and all(attempt.is_taken for attempt in self._attempts.values())
        if is_accepted and self._accepted is not None and not self._accepted.done():
            self._accepted.set_result(None)

    def _receive(self, delta: Delta) -> None:
        """Take in what a link brings."""
        attempt = self._attempts.get(delta.request_id)
        if attempt is None:
            return
        if delta.error is not None:
            self._lose(attempt, self.told([attempt.request.model], delta.error))
            return
        attempt.num_unfinished -= delta.finish is not None
        if not attempt.num_unfinished:
            del self._attempts[delta.request_id]
        before = attempt.history
        if self._take(before.part, delta) and before.since is not None:
            if before.number > 1:  # else its client has lost it, and not a replica
                self.stats.note_pause(before.part, before.since)
            attempt.history = replace(before, since=None, num_losses=0)

    def _take(self, part: int, delta: Delta) -> bool:
        """Pass on what is new in a delta of a prompt; return whether anything is."""
        if (news := self._progress[part].take(delta)) is None:
            return False
        index = part * self.requests[part].n + delta.sample
        num_tokens = self.stats.note(news, part=part, index=index)
        self._inbox.put(Event(index=index, part=part, delta=news, completion_tokens=num_tokens))
        return True

    def told(self, about: Iterable[ModelRef], error: ServeError) -> ServeError:
        """The error with the model that it is about, where the run has several."""
        models = set(about)
        if len({request.model for request in self.requests}) == 1 or not models:
            return error
        found = models.pop()
        return error.about(found.base if models else found.name)

    def _lose(self, attempt: Attempt, error: ServeError) -> None:
        """An attempt has failed: have another replica go on with it, or else tell the client."""
        request = attempt.request
        if self._has_left or self._attempts.pop(request.request_id, None) is None:
            return
        if not isinstance(error, ReplicaLost):
            attempt.link.abort([request.request_id])  # its other sequences may still run
        is_full = isinstance(error, Overloaded) and self._may_wait(attempt.history.since)
        if not is_full and not attempt.may_go_on(error, self._settings.max_placements):
            self.fail(error)
            return
        if isinstance(error, FAILURES) and not isinstance(error, ReplicaLeaves):  # who leaves may come back
            (self._lost if isinstance(error, ReplicaLost) else self._failed).add(attempt.link)
        if not is_full:
            self.stats.note_move(attempt.part)
        if not self._homeless:  # by then all that were lost with it are known, or there may be room
            asyncio.get_running_loop().call_later(FULL_AGAIN_S if is_full else 0.0, self._settle)
        self._homeless.append(attempt.lost_to(error, has_begun=self._progress[attempt.part].has_begun))

    def _place(self, homeless: Sequence[Homeless]) -> dict[ReplicaLink, list[tuple[Homeless, Guess]]]:
        """Each prompt on a replica that serves its model. Nothing waits between choosing and submitting."""
        shares: dict[ReplicaLink, list[tuple[Homeless, Guess]]] = {}
        links = {kind: self._links_for(*kind) for kind in {each.kind for each in homeless}}
        choices = self._fleet.placement.begin()
        for each in homeless:
            link, guess = choices.choose(each.request, links[each.kind])
            shares.setdefault(link, []).append((each, guess))
        return shares

    def _links_for(self, model: ModelRef, numerics: str) -> list[ReplicaLink]:
        """Replicas that have not failed this run. An engine that failed is asked again where it is the only one.

        numerics: of the replica that began, where another has to go on; "" is any
        """
        links = [link for link in self._fleet.links_for(model, numerics) if link not in self._lost]
        if not links:
            raise self._fleet.not_ready(model.name, ALL_LOST)
        return [link for link in links if link not in self._failed] or links

    def _pause(self) -> None:
        """The reader is slower than its text comes."""
        if self._settings.slow_reader == "abort":
            limit = f"{len(self._inbox) - 1} events"
            self.fail(DeadlineExceeded(f"The stream was read too slowly: more than {limit} were waiting to be read."))
            self._abort_all()
            return
        for link, request_ids in self._running().items():
            link.pause(request_ids)

    def _resume(self) -> None:
        for link, request_ids in self._running().items():
            link.resume(request_ids)

    def _expire(self) -> None:
        self.fail(self._too_late())

    @property
    def _seconds_left(self) -> float:
        return max(0.0, self._ends_at - time.monotonic())

    def _too_late(self) -> DeadlineExceeded:
        timeout_s = self._settings.timeout_s
        return DeadlineExceeded(f"The request took longer than {timeout_s:g} s.", None, {"timeout_s": timeout_s})

    def _leave(self) -> None:
        self._has_left = True
        if self._timer is not None:
            self._timer.cancel()
        self._abort_all()

    def _abort_all(self) -> None:
        running = self._running()
        self._attempts.clear()
        self._homeless.clear()
        for link, request_ids in running.items():
            link.abort(request_ids)

    def _stats_by(self, key: Callable[[GenerationRequest], Key]) -> dict[Key, RunStats]:
        """Of those requests together that have this in common."""
        parts: dict[Key, set[int]] = {}
        for part, request in enumerate(self.requests):
            parts.setdefault(key(request), set()).add(part)
        if len(parts) == 1:
            return dict.fromkeys(parts, self.stats)
        return {name: self.stats.of(of_name) for name, of_name in parts.items()}

    def _running(self) -> dict[ReplicaLink, list[str]]:
        """The requests that have not ended, by where they run."""
        running: dict[ReplicaLink, list[str]] = {}
        for request_id, attempt in self._attempts.items():
            running.setdefault(attempt.link, []).append(request_id)
        return running


LOOK_AGAIN_S = 0.05
"""How often a prompt that waits for a replica looks for one."""
FULL_AGAIN_S = 0.5
"""After how long a prompt that waits asks again for a place, where the queue of a replica was full."""
MAX_FAILURES = 1
"""Failures that a prompt survives: one that fails again is likely at fault itself."""
FAILURES = EngineFailed, AdapterNotFound, AdapterUnusable
"""What another replica may not fail with. A replica can lose files of an adapter that its card still has."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A prompt as it was given to a replica.

    request:   with an id that no other attempt has, so that nothing which comes late is taken for news
    history:   what the attempts before came to
    is_taken:  whether the replica has answered its submission
    """

    request: GenerationRequest
    link: ReplicaLink
    history: Homeless
    num_unfinished: int
    is_taken: bool = False

    @property
    def part(self) -> int:
        return self.history.part

    def may_go_on(self, error: ServeError, max_placements: int) -> bool:
        """Whether the client need not be told of this error."""
        before = self.history
        if isinstance(error, ReplicaLeaves):
            return True
        if before.num_losses + before.num_failures + 1 >= max_placements or not isinstance(error, FAILURES):
            return False
        return isinstance(error, ReplicaLost) or before.num_failures < MAX_FAILURES

    def lost_to(self, error: ServeError, *, has_begun: bool) -> Homeless:
        """What is left of it; its request goes on under another id."""
        before, is_loss = self.history, isinstance(error, ReplicaLost)
        is_failure = isinstance(error, FAILURES) and not is_loss
        return replace(
            before,
            request=self.request,
            number=before.number + 1,
            num_losses=before.num_losses + (is_loss and not isinstance(error, ReplicaLeaves)),
            num_failures=before.num_failures + is_failure,
            numerics=self.link.card.model.numerics if has_begun else "",
            since=time.monotonic() if before.since is None else before.since,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Homeless:
    """A prompt that is to be given to a replica, with what the attempts before came to.

    part:     which of the run's requests it is of
    number:   of the attempt that is next, from 1
    num_losses: since something new came;  planned moves are no losses
    num_failures: steps that failed with it, ever: it may be what fails them
    numerics: of the replica that had it
    since:    when the first attempt was lost since which nothing new came, by the monotonic clock, seconds
    """

    request: GenerationRequest
    part: int
    number: int = 1
    num_losses: int = 0
    num_failures: int = 0
    numerics: str = ""
    since: float | None = None

    @property
    def kind(self) -> tuple[ModelRef, str]:
        """What the replicas that can take it have."""
        return self.request.model, self.numerics

    def on(self, link: ReplicaLink, run: str, progress: Progress, stop: StopParams) -> Attempt:
        """The next attempt, from where the completions are. The first one is named by its run and the part alone."""
        name = f"{run}/{self.part}"
        request_id = name if self.number == 1 else f"{name}/{self.number}"
        request = progress.go_on(replace(self.request, request_id=request_id, stop=stop))
        return Attempt(request=request, link=link, history=self, num_unfinished=len(request.samples))
