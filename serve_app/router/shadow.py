"""Has a share of an alias's requests computed by a second version, too, and shows that to nobody but the operator."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from serve_app.api.sse import dump
from serve_app.core.errors import ModelLoading, Overloaded, ServeError
from serve_app.core.request import GenerationRequest
from serve_app.core.shares import Share
from serve_app.router.admission import Admission
from serve_app.router.fleet import Fleet
from serve_app.router.lower import new_response_id
from serve_app.router.patience import begin
from serve_app.router.run import Run, RunSettings

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 8
"""Requests of one router that are computed in the shadow of others."""
FLOW = "(shadow)"
"""No tenant has such a name."""
SHARE = Share(flow=FLOW, weight=0.001, priority="batch")

Lower = Callable[[str], Sequence[GenerationRequest]]
"""Returns what a request asks of the shadow's model, by the id of the response."""


class Outcome(StrEnum):
    """What became of a shadow: computed whole, failed, or given up as the model's slots were needed."""

    DONE = "done"
    FAILED = "failed"
    DROPPED = "dropped"


class _SlotsNeeded(Exception):
    """Raised when requests that are shown need the slots."""


@dataclass(slots=True)
class Tally:
    """What the shadows of one address came to. The rest is of those that are done alone.

    first_token_s, decode_s: sums of seconds: until the first token, and from there to the last
    """

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    completion_tokens: int = 0
    first_token_s: float = 0.0
    decode_s: float = 0.0


class Shadows:
    """Those of one router. They are no requests of a tenant: no limit, ledger row or place counts them.

    A shadow begins only where its model has slots that nobody needs, and ends as soon as somebody needs them. It
    outlives its client: what it is compared by does not depend on who reads.
    tallies: by the address that the operator wrote
    """

    def __init__(self, fleet: Fleet, admission: Admission) -> None:
        self.tallies: dict[str, Tally] = {}
        self._fleet = fleet
        self._admission = admission
        self._tasks: set[asyncio.Task[None]] = set()
        self._sizes: Counter[str] = Counter()  # sequences that run, by base

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def begin(self, address: str, lower: Lower, *, request_id: str, settings: RunSettings) -> None:
        """Compute one more, if there is room; never waits.

        request_id: of the request that it is the shadow of
        """
        if len(self._tasks) >= MAX_AT_ONCE:
            self._tally(address).outcomes[Outcome.DROPPED] += 1
            return
        begin(self._run(address, lower, request_id=request_id, settings=settings), self._tasks)

    async def _run(self, address: str, lower: Lower, *, request_id: str, settings: RunSettings) -> None:
        began_at, outcome, code = time.monotonic(), Outcome.FAILED, ""
        tally = self._tally(address)
        try:
            await self._compute(tally, lower, settings)
            outcome = Outcome.DONE
        except (Overloaded, ModelLoading, _SlotsNeeded):
            outcome = Outcome.DROPPED
        except ServeError as error:
            code = error.code
        except Exception:
            logger.exception("a shadow of %s failed", address)
        finally:
            tally.outcomes[outcome] += 1
            seconds = round(time.monotonic() - began_at, 6)
            facts = {"event": "shadow", "request_id": request_id, "served": address, "outcome": outcome.value}
            logger.info(dump(facts | {"duration_s": seconds} | ({"error_code": code} if code else {})))

    async def _compute(self, tally: Tally, lower: Lower, settings: RunSettings) -> None:
        response_id = new_response_id("shadow")
        asked = [replace(each, share=SHARE, is_read_whole=False) for each in lower(response_id)]
        sizes: Counter[str] = Counter()
        for each in asked:
            sizes[each.model.base] += each.n
        self._sizes += sizes
        try:
            self._check_room(sizes)
            async with Run(asked, response_id, fleet=self._fleet, settings=settings) as run:
                async for _ in run:
                    self._check_room(sizes)
        finally:
            self._sizes -= sizes
        first_at, last_at = run.stats.shown_at
        tally.completion_tokens += run.stats.usage.completion_tokens
        tally.first_token_s += first_at - run.stats.entered_at
        tally.decode_s += last_at - first_at

    def _check_room(self, sizes: Counter[str]) -> None:
        """Raises _SlotsNeeded unless a request that comes now would find a slot beside all shadows."""
        if any(self._admission.free_slots(base) <= self._sizes[base] for base in sizes):
            raise _SlotsNeeded

    def _tally(self, address: str) -> Tally:
        return self.tallies.setdefault(address, Tally())
