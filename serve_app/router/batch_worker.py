"""Computes the lines of batches in a router: in slots that nobody waits for, each until it has a result."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from operator import itemgetter
from typing import Any

from serve_app.core.batches import (
    AGAIN,
    FAULT,
    MAX_LINES,
    OK,
    REST_S,
    Answered,
    BatchCard,
    BatchState,
    Checked,
    Kept,
    Key,
    Line,
    Result,
    Work,
)
from serve_app.core.errors import ServeError
from serve_app.core.ledger import Row
from serve_app.core.shares import BATCH
from serve_app.core.tenants import Identity, Tenant
from serve_app.router.batch_files import Ask, BatchFiles, request_id
from serve_app.router.ledger_writer import LedgerWriter
from serve_app.router.router import Router

logger = logging.getLogger(__name__)

LEAST_S, MOST_S = 0.2, 1.0
"""Between two calls of Accounts: the least where no leased line is left to begin, or a file was read or written.

Calls have their price: with five in a second two cores computed a twentieth less.
"""
SWEEP_S = 60.0
PAGE = 200
MAX_REST_S = 60.0
NO_ROOM_TOLD = 8
"""Lines at a time, of a model whose replicas do not say what they hold."""
UNKNOWN_S = 120.0
"""For so long a model may be unknown before its lines fail: it may be loading, here or on its way back."""
MAX_ATTEMPTS = 3
"""Of a line that fails by the service's fault."""
UNKNOWN, AT_LIMIT = 404, 429
LEFT, RUNNING = LINE_STATES = ("left", "running")
"""Of lines of open batches: without a result, wherever they are; computed by this router."""
COMPLETED, FAILED = OUTCOMES = ("completed", "failed")
"""Of lines whose results this router brought, as OpenAI counts them."""
FAILED_REST_S = 15.0
"""For so long a batch rests of which a file cannot be read or written."""


Answer = Callable[[Router, Identity, str, bytes, str], Awaitable[Answered]]
"""Computes one request as its route would: router of its tenant, identity, path, body, id of the request."""


class Bound:
    """How many lines a tenant may have at work, as one was refused for a limit of it.

    most: as many as there were beside the last that was refused. At its time one more may begin; if that is not
          refused, two more a moment later, then four: one limit is soon forgotten, another costs few refusals.
    """

    def __init__(self) -> None:
        self.most, self._step, self._until = 0, 0, 0.0

    def narrow(self, num_others: int, now: float, again_at: float) -> None:
        """Note a refusal. Of those that come together the earliest time counts."""
        is_first = self._step != 1 or self._until <= now
        self.most, self._step, self._until = num_others, 1, again_at if is_first else min(self._until, again_at)

    def widen(self, now: float) -> None:
        """Let more lines begin if it is time."""
        if now >= self._until:
            self.most, self._until = self.most + self._step, now + REST_S
            self._step = min(2 * self._step, MAX_LINES)


class LineRows(LedgerWriter):
    """Keeps the rows of each line until they are committed with its result."""

    def __init__(self) -> None:
        self._of: dict[str, list[Row]] = {}

    def write(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._of.setdefault(row.request_id, []).append(row)

    def take(self, request_id: str) -> list[Row]:
        return self._of.pop(request_id, [])


class BatchWorker:
    """Asks Accounts for lines as slots are free, and brings them results until they have them.

    A line begins only where its model has a slot beside all requests that are admitted, so batches give way to whoever
    waits. A line that is refused for want of room or of a replica lets its batch rest and comes again. One that is
    refused for a limit leaves its tenant with as many lines at work as there are beside it, and comes again, too.

    clock: seconds, monotonic
    tenant_of: who a batch is of, as it is now
    tally:  numbers of lines, by LINE_STATES and OUTCOMES
    """

    def __init__(
        self,
        ask: Ask,
        router: Router,
        files: BatchFiles,
        answer: Answer,
        tenant_of: Callable[[str], Tenant | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        tally: Counter[str] | None = None,
    ) -> None:
        self._clock = clock
        self.tally: Counter[str] = Counter() if tally is None else tally
        self._ask, self._files, self._tenant_of = ask, files, tenant_of
        self._rows = LineRows()
        self._views: dict[str, tuple[Tenant, Router]] = {}
        self._open: dict[str, BatchCard] = {}
        self._ready: deque[Line] = deque()
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._at_work: Counter[str] = Counter()  # lines by model
        self._results: dict[Key, Result] = {}
        self._rests_until: dict[str, float] = {}
        self._bounds: dict[str, Bound] = {}  # by tenant
        self._refused: set[Key] = set()  # lines at a limit, until their tasks are over
        self._unknown_since: dict[str, float] = {}
        self._attempts: Counter[Key] = Counter()
        self._swept_at = self._clock()
        self._is_reached = True
        self._is_short = asyncio.Event()  # Accounts are to be asked soon
        self.take_over(router, answer)

    def take_over(self, router: Router, answer: Answer) -> None:
        """Compute by these from now on."""
        self._router, self.answer = router, answer
        self._views.clear()

    @property
    def num_at_work(self) -> int:
        """Lines that are computed."""
        return self._at_work.total()

    async def run(self) -> None:
        """Work for ever."""
        while True:
            try:
                await self.tend()
                self._is_reached = True
            except Exception as error:  # whatever it is, this loop is how it ends
                if self._is_reached:
                    logger.warning("batches cannot be tended: %s", error, exc_info=not isinstance(error, ServeError))
                self._is_reached = False
            await asyncio.sleep(LEAST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(MOST_S - LEAST_S):
                    await self._is_short.wait()

    async def close(self) -> None:
        """Give up what is computed; another router computes it."""
        self._ready.clear()  # so that no line begins where one ends
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def tend(self) -> None:
        """Bring results, and begin what Accounts give. Raises ServeError; results are brought again then."""
        self._is_short.clear()
        results = dict(self._results)
        held = self._held
        counts, accounting = self._router.fleet.counts, self._router.accounting
        counted = counts.take() if results else []
        prices = None if accounting is None else accounting.prices
        router_id = self._router.fleet.router_id
        try:
            work = await self._ask("work", router_id, held, self._wanted(), [*results.values()], counted, prices)
        except BaseException:
            counts.give_back(counted)
            raise
        assert isinstance(work, Work)
        for key in results:
            self.tally[COMPLETED if self._results.pop(key).status == OK else FAILED] += 1
        if any(batch.state is BatchState.IN_PROGRESS and not self._is_on(batch.id) for batch in work.batches):
            self._is_short.set()  # its lines are asked for with the next call
        self._open = {batch.id: batch for batch in work.batches}
        self._forget_ended()
        mine = set(self._held)
        self._ready = in_turn([*self._ready, *(line for line in work.lines if line.key not in mine)])
        for batch in work.batches:
            if batch.is_yours and not self._rests(batch.id) and (batch.id, 0) not in self._tasks:
                self._begin((batch.id, 0), self._look_after(batch))
        self._begin_lines()
        self.tally[LEFT], self.tally[RUNNING] = sum(batch.num_left for batch in work.batches), self.num_at_work
        if self._clock() >= self._swept_at + SWEEP_S:
            self._swept_at = self._clock()
            await self._files.sweep(self._ask)

    def _wanted(self) -> dict[str, int]:
        """Return how many lines to lease, by batch: for each model of each tenant the oldest, to equal parts.

        As many wait as there are slots: lines of one length end together, and no slot stays empty until the next call.
        """
        first: dict[str, dict[str, BatchCard]] = {}  # by model and tenant
        for batch in self._open.values():
            if self._is_on(batch.id) and not self._rests(batch.id) and batch.num_left > len(self._of(batch.id)):
                first.setdefault(self._model_of(batch), {}).setdefault(batch.tenant, batch)
        wanted: dict[str, int] = {}
        for model, batches in first.items():
            room = self._router.fleet.rooms.get(model)
            most = self._num_free(model) + (0 if room is None else room.num_slots)
            for batch in batches.values():
                num_ready = sum(line.batch == batch.id for line in self._ready)
                wanted[batch.id] = max(0, -(-most // len(batches)) - num_ready)
        for tenant, bound in self._bounds.items():
            self._keep_within(bound, wanted, [batch for batch in self._open.values() if batch.tenant == tenant])
        return wanted

    def _keep_within(self, bound: Bound, wanted: dict[str, int], batches: list[BatchCard]) -> None:
        """Lessen what a tenant's batches take to what it may have at work; who has least is the first."""
        bound.widen(self._clock())
        begun = Counter(key[0] for key in (*self._tasks, *(line.key for line in self._ready)) if key[1])
        left = bound.most - sum(begun[batch.id] for batch in batches)
        takers = sorted((begun[batch.id], at, batch.id) for at, batch in enumerate(batches) if batch.id in wanted)
        for at, (_, _, batch_id) in enumerate(takers):
            wanted[batch_id] = max(0, min(wanted[batch_id], -(-left // (len(takers) - at))))
            left -= wanted[batch_id]

    def _rests(self, batch_id: str) -> bool:
        return self._rests_until.get(batch_id, 0.0) > self._clock()

    def _of(self, batch_id: str) -> set[Key]:
        """Return what this router holds of a batch."""
        return {key for key in self._held if key[0] == batch_id and key[1]}

    @property
    def _held(self) -> list[Key]:
        return [*self._tasks, *(line.key for line in self._ready), *self._results]

    def _forget_ended(self) -> None:
        self._ready = deque(each for each in self._ready if self._is_on(each.batch))
        for known in (self._rests_until, self._unknown_since):
            for batch_id in known.keys() - self._open.keys():
                del known[batch_id]
        for tenant in self._bounds.keys() - {batch.tenant for batch in self._open.values()}:
            del self._bounds[tenant]
        for key in [key for key in self._attempts if key[0] not in self._open]:
            del self._attempts[key]

    def _is_on(self, batch_id: str) -> bool:
        batch = self._open.get(batch_id)
        return batch is not None and batch.state is BatchState.IN_PROGRESS

    def _num_free(self, model: str) -> int:
        """Return how many lines may begin. Of a model without replicas it is one, which wakes it or waits for it."""
        room = self._router.fleet.rooms.get(model)
        if room is None:
            return (NO_ROOM_TOLD if model in self._router.fleet.cards else 1) - self._at_work[model]
        beside = room.num_slots - room.num_foreign - self._at_work[model]
        return min(beside, self._router.admission.free_slots(model))

    def _begin_lines(self) -> None:
        waiting: deque[Line] = deque()
        full: set[str] = set()  # batches; looked at once, as many lines may wait
        while self._ready:
            line = self._ready.popleft()
            model = "" if line.batch in full else self._model_of(self._open[line.batch])
            if line.batch in full or self._num_free(model) <= 0:
                full.add(line.batch)
                waiting.append(line)
                continue
            self._at_work[model] += 1
            self._begin(line.key, self._compute(self._open[line.batch], line, model))
        self._ready = waiting

    def _begin(self, key: Key, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._note_end(key, done))

    def _note_end(self, key: Key, task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        self._refused.discard(key)
        if not (key[1] and any(line.batch == key[0] for line in self._ready)):
            self._is_short.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._rests_until[key[0]] = self._clock() + FAILED_REST_S
            logger.warning("batch %s, line %d: %r; it comes again", *key, error)

    async def _compute(self, batch: BatchCard, line: Line, model: str) -> None:
        own_id = request_id(*line.key)
        try:
            entry = await asyncio.to_thread(self._files.read, batch.input_file, line.offset, line.length)
            seen = self._view_of(batch.tenant)
            if seen is None:
                return
            tenant, router = seen
            body = json.dumps(entry["body"]).encode()
            answered = await self.answer(router, Identity(tenant=tenant), batch.endpoint, body, own_id)
            rows = [replace(row, key_id=batch.key_id) for row in self._rows.take(own_id)]
            if not self._comes_again(batch, line, answered):
                text, status = json.dumps(answered.line(own_id, str(entry["custom_id"]))), answered.status
                result = Result(batch=line.batch, number=line.number, status=status, text=text, rows=tuple(rows))
                self._results[line.key] = result
        finally:
            self._rows.take(own_id)
            self._at_work[model] -= 1
            if self._is_on(batch.id):
                asyncio.get_running_loop().call_soon(self._begin_lines)

    def _comes_again(self, batch: BatchCard, line: Line, answered: Answered) -> bool:
        """Return whether a line is to be computed again; until then its batch rests, or its tenant has a bound."""
        now, batch_id, status = self._clock(), line.batch, answered.status
        if status == UNKNOWN:
            comes = now - self._unknown_since.setdefault(batch_id, now) < UNKNOWN_S
        elif status >= FAULT and status not in AGAIN:
            self._attempts[line.key] += 1
            comes = self._attempts[line.key] < MAX_ATTEMPTS
        else:
            comes = status in AGAIN
            if not comes:
                self._unknown_since.pop(batch_id, None)
        again_at = now + min(max(answered.retry_s, REST_S), MAX_REST_S)
        if comes and status == AT_LIMIT:
            of_tenant = {each.id for each in self._open.values() if each.tenant == batch.tenant}
            self._refused.add(line.key)
            num_others = sum(key[0] in of_tenant and key[1] > 0 for key in self._tasks.keys() - self._refused)
            self._bounds.setdefault(batch.tenant, Bound()).narrow(num_others, now, again_at)
            self._ready = deque(each for each in self._ready if each.batch not in of_tenant)
        elif comes:
            self._rests_until[batch_id] = again_at
            self._ready = deque(each for each in self._ready if each.batch != batch_id)
        return comes

    async def _look_after(self, batch: BatchCard) -> None:
        """Check the input of a batch, or write the files of one that ends."""
        if batch.state is BatchState.VALIDATING:
            checked: Checked = await asyncio.to_thread(self._files.check, batch)
            await self._ask("check", batch.id, checked)
            return
        loop = asyncio.get_running_loop()

        def pages() -> Iterator[list[Kept]]:
            """Run in a worker thread."""
            after = 0
            while page := asyncio.run_coroutine_threadsafe(self._page(batch.id, after), loop).result():
                yield page
                after = page[-1].line.number

        num_kept, files = await asyncio.to_thread(self._files.finish, batch, pages())
        if not await self._ask("end", batch.id, num_kept, files):
            for file in files.values():
                await asyncio.to_thread(self._files.remove, file.id)

    async def _page(self, batch_id: str, after: int) -> list[Kept]:
        found = await self._ask("kept", batch_id, after, PAGE)
        assert isinstance(found, list)
        return found

    def _model_of(self, batch: BatchCard) -> str:
        """Return the base that a batch's model means now, or its own name where nothing does."""
        seen = self._view_of(batch.tenant)
        try:
            return batch.model if seen is None else seen[1].view.resolve(batch.model).base
        except ServeError:
            return batch.model

    def _view_of(self, name: str) -> tuple[Tenant, Router] | None:
        """Return the tenant with its batches' priority, and the router as it sees it; None where it is gone."""
        tenant = self._tenant_of(name)
        if tenant is None:
            return None
        tenant = replace(tenant, priority=BATCH)
        if self._views.get(name, (None,))[0] != tenant:
            router = self._router.seen_by(tenant)
            accounting = self._router.accounting
            router.accounting = None if accounting is None else accounting.writing_to(self._rows)
            self._views[name] = tenant, router
        return self._views[name]


def in_turn(lines: Iterable[Line]) -> deque[Line]:
    """Return the lines so that batches take turns, each in its own order: none waits for all of another's."""
    seen = Counter[str]()
    rounds: list[tuple[int, Line]] = []
    for line in lines:
        rounds.append((seen[line.batch], line))
        seen[line.batch] += 1
    return deque(line for _, line in sorted(rounds, key=itemgetter(0)))
