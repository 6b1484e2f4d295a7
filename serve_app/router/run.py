"""One client's request while it runs: its prompts on their replicas, their deltas in one stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from serve_app.core.delta import Delta, FinishReason, PromptReport, Usage
from serve_app.core.errors import DeadlineExceeded, ReplicaLost, ServeError
from serve_app.core.request import GenerationRequest
from serve_app.router.fleet import Fleet
from serve_app.router.link import ReplicaLink
from serve_app.router.placement import Placement

MAX_PLACEMENTS = 3
"""Replicas that a prompt is offered to before its loss is the client's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A delta with its place in the response.

    index: of the choice, prompt index times `n` plus sample
    """

    index: int
    prompt_index: int
    delta: Delta


class Run:
    """Use as `async with run: async for event in run: …`.

    Entering submits every prompt; one refusal refuses all and is raised. The iterator raises the first
    error that comes and otherwise ends when every choice has ended. Leaving aborts what has not ended: it
    never waits, so a cancellation cannot skip it.

    entered_at, first_event_at, last_event_at: by the monotonic clock, seconds
    queue_s: of each prompt, from its arrival at a replica to the step that took it in
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        response_id: str,
        *,
        fleet: Fleet,
        placement: Placement,
        timeout_s: float,
    ) -> None:
        self.response_id = response_id
        self.requests = tuple(requests)
        self.usage = Usage()
        self.num_generated = 0  # also of completions that never ended
        self._fleet = fleet
        self._placement = placement
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._queue: asyncio.Queue[Delta | ServeError] = asyncio.Queue()
        self._by_id = {request.request_id: request for request in requests}
        self._num_unfinished = {request.request_id: request.n for request in requests}
        self._shares: dict[ReplicaLink, list[GenerationRequest]] = {}
        self._lost: set[ReplicaLink] = set()
        self.finish_reasons: dict[FinishReason, int] = {}
        self.entered_at = time.monotonic()
        self.first_event_at: float | None = None
        self.last_event_at: float | None = None
        self.queue_s: list[float] = []

    @property
    def has_ready(self) -> bool:
        """Whether the next event is there already."""
        return not self._queue.empty()

    async def __aenter__(self) -> Self:
        try:
            await self._submit()
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
        if not self._num_unfinished:
            raise StopAsyncIteration
        delta = await self._queue.get()
        if isinstance(delta, ServeError):
            raise delta
        if delta.error is not None:
            raise delta.error
        self._account(delta)
        self.last_event_at = time.monotonic()
        self.first_event_at = self.first_event_at or self.last_event_at
        request = self._by_id[delta.request_id]
        return Event(
            index=request.prompt_index * request.n + delta.sample,
            prompt_index=request.prompt_index,
            delta=delta,
        )

    async def _submit(self) -> None:
        """Give every prompt to a replica, and to another where the first is lost before it has accepted."""
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)
        homeless: Sequence[GenerationRequest] = self.requests
        for num_placements_left in reversed(range(MAX_PLACEMENTS)):
            homeless = await self._submit_once(homeless, may_move=num_placements_left > 0)
            if not homeless:
                return

    async def _submit_once(self, requests: Sequence[GenerationRequest], *, may_move: bool) -> list[GenerationRequest]:
        """Submit these; give back those whose replica was lost meanwhile, which nothing was computed of."""
        shares = self._place(requests)
        for link, share in shares.items():
            self._shares[link] = self._shares.get(link, []) + share
        submissions = {link: link.submit(share, self._queue.put_nowait) for link, share in shares.items()}
        _, pending = await asyncio.wait(submissions.values(), timeout=self._timeout_s)
        if pending:
            raise self._too_late()
        homeless: list[GenerationRequest] = []
        for link, submission in submissions.items():
            refusal = submission.result()
            if isinstance(refusal, ReplicaLost) and may_move:
                homeless += shares[link]
                del self._shares[link]
                self._lost.add(link)
            elif refusal is not None:
                raise refusal
        self._drop_deltas({request.request_id for request in homeless})
        return homeless

    def _drop_deltas(self, request_ids: Set[str]) -> None:
        """Forget what a lost replica said of these requests: they begin anew elsewhere."""
        kept = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        for item in kept:
            if isinstance(item, ServeError) or item.request_id not in request_ids:
                self._queue.put_nowait(item)

    def _place(self, unplaced: Sequence[GenerationRequest]) -> dict[ReplicaLink, list[GenerationRequest]]:
        """Each prompt on a replica that serves its model. Nothing waits between choosing and submitting."""
        shares: dict[ReplicaLink, list[GenerationRequest]] = {}
        by_model: dict[object, list[GenerationRequest]] = {}
        for request in unplaced:
            by_model.setdefault(request.model, []).append(request)
        for requests in by_model.values():
            links = [link for link in self._fleet.links_for(requests[0].model) if link not in self._lost]
            if not links:
                raise ReplicaLost(f"Every replica of model `{requests[0].model.name}` was lost; retry.")
            standings = [
                replace(link.standing, work=link.standing.work + sum(r.n for r in shares.get(link, ())))
                for link in links
            ]
            chosen = self._placement.place([request.n for request in requests], standings)
            for request, index in zip(requests, chosen, strict=True):
                shares.setdefault(links[index], []).append(request)
        return shares

    def _account(self, delta: Delta) -> None:
        self.num_generated += len(delta.token_ids)
        if delta.prompt is not None:
            self._count_prompt(delta.prompt)
        if delta.finish is not None:
            reason = delta.finish.reason
            self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + 1
            self.usage = replace(self.usage, completion_tokens=self.usage.completion_tokens + delta.finish.num_tokens)
            self._num_unfinished[delta.request_id] -= 1
            if self._num_unfinished[delta.request_id] == 0:
                del self._num_unfinished[delta.request_id]

    def _count_prompt(self, report: PromptReport) -> None:
        self.queue_s.append(report.queue_s)
        self.usage = replace(
            self.usage,
            prompt_tokens=self.usage.prompt_tokens + report.num_tokens,
            cached_tokens=self.usage.cached_tokens + report.num_cached_tokens,
            truncated_tokens=self.usage.truncated_tokens + report.num_dropped_tokens,
        )

    def _expire(self) -> None:
        self._queue.put_nowait(self._too_late())

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"The request took longer than {self._timeout_s:g} s.", None, {"timeout_s": self._timeout_s}
        )

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        shares, self._shares = self._shares, {}
        for link, share in shares.items():
            unfinished = [r.request_id for r in share if r.request_id in self._num_unfinished]
            if unfinished:
                link.abort(unfinished)
