"""Watches the requests of adapters that have a canary, scores some of them, and carries out what is judged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import NamedTuple
from uuid import uuid4

from serve_app.api.adapters import ListedAdapter, ListedCanary, ListedVersion
from serve_app.core.adapters import Canary, PublishedAdapter
from serve_app.core.backend import has_images
from serve_app.core.errors import AdapterNotFound, AdapterUnusable, DeadlineExceeded, EngineFailed, ServeError
from serve_app.core.names import ModelRef
from serve_app.core.prompt import Prompt
from serve_app.core.request import GenerationRequest, LogprobParams, StopParams
from serve_app.core.shares import Share
from serve_app.router.fleet import Fleet
from serve_app.router.patience import begin
from serve_app.router.publishing import Publishing
from serve_app.router.rollout import MIN_SCORED, Comparison, Decision, RolloutSettings, Tally, Verdict, judge, lacking
from serve_app.router.run import Run, RunSettings

logger = logging.getLogger(__name__)

FLOW = Share(flow="(rollout)", weight=0.1, priority="batch")
"""Of the service itself: no tenant can be called so."""
MAX_SCORING = 2
"""Requests that a router scores at once; others are not scored."""
MAX_PROMPT_TOKENS = 8192
"""A longer prompt is not scored."""
MAX_DRAWN = 256
"""Tokens of a completion that are scored, the first ones."""
AHEAD = MIN_SCORED // 2
"""So many more requests of the version beside a canary may be scored than of the canary."""
SCORING = RunSettings(timeout_s=60.0)
RETRY_S = 5.0
"""After a verdict that could not be carried out."""
FAILURES = EngineFailed, AdapterUnusable, AdapterNotFound, DeadlineExceeded
"""Errors of a request whose model was there; a version may be at fault."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """A canary at one step.

    adapter:    as it is published
    num_scored: requests of which scoring has begun, by version
    is_decided: whether a verdict is being carried out
    is_told:    whether it was told that the canary is held
    """

    adapter: PublishedAdapter
    canary: Canary
    found: Comparison = field(default_factory=Comparison)
    num_scored: Counter[str] = field(default_factory=Counter)
    is_decided: bool = False
    is_told: bool = False

    def tally(self, version: str) -> Tally:
        return self.found.canary if version == self.canary.version else self.found.beside

    def wants(self, version: str, *, most: int) -> bool:
        """Return whether one more request of a version is to be scored, beside so many at most."""
        num_of_canary = self.num_scored[self.canary.version]
        bound = most if version == self.canary.version else min(most, num_of_canary + AHEAD)
        return self.num_scored[version] < bound


class TokenIds(NamedTuple):
    """The token ids of one prompt with one completion."""

    prompt: tuple[int, ...]
    drawn: tuple[int, ...]


class Rollouts:
    """Compares each canary with the version beside it, by the requests that this router has answered.

    Each router judges by its own requests. Which share a canary has is part of what is published, so

    1. a share is widened only if it still is the one that was judged: one router does it, and all begin to count anew;
    2. a canary that any router has rolled back stays so.

    A canary with too few requests is held: it keeps its share and is compared on, and `look` tells it once.

    A router that starts counts from nothing.
    """

    def __init__(self, publishing: Publishing, fleet: Fleet, settings: RolloutSettings | None = None) -> None:
        self.settings = settings or RolloutSettings()
        self.decisions: Counter[Decision] = Counter()
        self._publishing = publishing
        self._fleet = fleet
        self._trials: dict[str, Trial] = {}
        self._scoring: set[asyncio.Task[None]] = set()
        self._deciding: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        """Return whether a request is being scored, or a verdict carried out."""
        return bool(self._scoring or self._deciding)

    @property
    def num_canaries(self) -> int:
        """Return how many adapters have a canary."""
        return sum(each.canary is not None for each in self._publishing.known.adapters)

    @property
    def held(self) -> list[Trial]:
        """Return the trials that have had their share for longer than requests should take to come."""
        canaries = ((each, each.canary) for each in self._publishing.known.adapters if each.canary is not None)
        return [self._trial_of(*each) for each in canaries if self._is_held(each[1])]

    def look(self) -> None:
        """Tell of each canary once that it is held. Never waits; called again and again."""
        for trial in self.held:
            if not trial.is_told:
                trial.is_told = True
                held = Verdict(decision="hold", reason=lacking(trial.found, self.settings))
                begin(self._carry_out(trial, held), self._deciding)

    def wants(self, requests: Sequence[GenerationRequest]) -> bool:
        """Return whether a client's request is to be scored when it is over: then its token ids are needed."""
        if len(requests) != 1 or not _is_scorable(requests[0]):
            return False
        model = requests[0].model
        trial = self._trial(model)
        if trial is None or not trial.wants(model.version, most=self.settings.requests):
            return False
        trial.found.num_scorable += 1
        return True

    def observe(self, run: Run, error: ServeError | None) -> None:
        """Count a client's request that is over. A refusal says nothing of a version."""
        models = {request.model for request in run.requests}
        trial = self._trial(*models) if len(models) == 1 else None
        if trial is None or not (error is None or isinstance(error, FAILURES)):
            return
        [model] = models
        first_s = None if error is not None else run.stats.waits[1]
        token_s = None if error is not None else run.stats.token_s(sum(each.n for each in run.requests))
        trial.tally(model.version).note(is_error=error is not None, first_s=first_s, token_s=token_s)
        if error is None and len(run.requests) == 1 and _is_scorable(run.requests[0]):
            self._begin_scoring(trial, run.requests[0], _token_ids_of(run))
        self._decide(trial)

    def told(self, entry: ListedAdapter) -> ListedAdapter:
        """Return an adapter's entry with its canary, if it has one."""
        published = self._publishing.known.find(entry.base, entry.name)
        if published is None or published.canary is None:
            return entry
        trial = self._trial_of(published, published.canary)
        divergences = trial.found.divergences
        listed = ListedCanary(
            version=trial.canary.version,
            path=trial.canary.path,
            share=trial.canary.share,
            since=trial.canary.since,
            by=trial.canary.by,
            counted=_listed(trial.found.canary),
            beside=_listed(trial.found.beside),
            divergence=fmean(divergences) if divergences else None,
            scored=len(divergences),
            held=lacking(trial.found, self.settings) if self._is_held(published.canary) else None,
        )
        return replace(entry, canary=listed)

    def _trial(self, model: ModelRef) -> Trial | None:
        """Return the trial that a request for a model is part of."""
        if model.adapter is None or model.mix:
            return None
        published = self._publishing.known.find(model.base, model.adapter)
        if published is None or published.canary is None:
            return None
        is_compared = model.version in (published.version, published.canary.version)
        return self._trial_of(published, published.canary) if is_compared else None

    def _trial_of(self, published: PublishedAdapter, canary: Canary) -> Trial:
        trial = self._trials.get(published.address)
        if trial is None or trial.adapter != published:
            known = self._publishing.known.adapters
            self._trials = {address: each for address, each in self._trials.items() if each.adapter in known}
            trial = self._trials[published.address] = Trial(adapter=published, canary=canary)
        return trial

    def _decide(self, trial: Trial) -> None:
        if trial.is_decided or self._trials.get(trial.adapter.address) is not trial:
            return
        verdict = judge(trial.found, self.settings)
        if verdict is not None:
            trial.is_decided = True
            begin(self._carry_out(trial, verdict), self._deciding)

    async def _carry_out(self, trial: Trial, verdict: Verdict) -> None:
        share = self.settings.after(trial.canary.share) if verdict.decision == "widen" else None
        try:
            await self._publishing.decide(verdict.decision, trial.adapter, share, verdict.reason)
        except ServeError as error:
            logger.warning("%s of %s was not done: %s", verdict.decision, trial.adapter.address, error)
            await asyncio.sleep(RETRY_S)
            if verdict.decision == "hold":
                trial.is_told = False
            else:
                trial.is_decided = False  # the next request tries it again
        else:
            self.decisions[verdict.decision] += 1

    def _is_held(self, canary: Canary) -> bool:
        return time.time() - canary.since >= self.settings.hold_after_s

    def _begin_scoring(self, trial: Trial, request: GenerationRequest, ids: TokenIds) -> None:
        """Score a request beside what clients ask for, unless others are being scored already."""
        version = request.model.version
        is_fitting = 0 < len(ids.prompt) <= MAX_PROMPT_TOKENS and ids.drawn
        if not is_fitting or len(self._scoring) >= MAX_SCORING:
            return
        if trial.wants(version, most=self.settings.requests):
            trial.num_scored[version] += 1
            begin(self._score(trial, request, ids), self._scoring)

    async def _score(self, trial: Trial, request: GenerationRequest, ids: TokenIds) -> None:
        """Have both versions say how likely the tokens are that one of them has drawn."""
        own = request.model
        others = {trial.canary.version, trial.adapter.version} - {own.version}
        try:
            [other] = [self._fleet.resolve(f"{own.name}@{version}") for version in others]
            scored = [_scoring(request, model, ids) for model in (own, other)]
            found = await self._logprobs(scored, num_drawn=len(ids.drawn))
        except ServeError as error:  # a replica is lost, or has no time
            trial.num_scored[own.version] -= 1
            logger.info("a request for %s was not scored: %s", own.name, error)
            return
        trial.found.score(*found)
        self._decide(trial)

    async def _logprobs(self, requests: Sequence[GenerationRequest], *, num_drawn: int) -> list[list[float]]:
        """Return what each request says of the last tokens of its prompt. Raises ServeError."""
        found: dict[int, list[float]] = {}
        run = Run(
            [replace(each, request_id=f"rollout-{uuid4().hex}") for each in requests],
            f"rollout-{uuid4().hex}",
            fleet=self._fleet,
            settings=SCORING,
        )
        async with run:
            async for event in run:
                if event.delta.prompt is not None:
                    told = event.delta.prompt.logprobs or ()
                    found[event.part] = [each.logprob for each in told[-num_drawn:] if each.logprob is not None]
        if set(map(len, found.values())) != {num_drawn}:
            raise EngineFailed("A replica did not say how likely the tokens are.")
        return [found[part] for part in range(len(requests))]


def _is_scorable(request: GenerationRequest) -> bool:
    """Return whether a request has one completion of a prompt that is text or token ids alone."""
    return request.n == 1 and not has_images(request) and request.record is None and request.stop.max_tokens != 0


def _scoring(request: GenerationRequest, model: ModelRef, ids: TokenIds) -> GenerationRequest:
    """Return the request that scores tokens under a model: no token is drawn, and no tenant is charged."""
    return GenerationRequest(
        request_id=request.request_id,
        model=model,
        prompt=Prompt(parts=((*ids.prompt, *ids.drawn),), adds_special=False),
        stop=StopParams(max_tokens=0),
        logprobs=LogprobParams(top=0, prompt=True),
        echo=True,
        echo_last=len(ids.drawn),
        uses_cache=False,
        is_read_whole=True,
        share=FLOW,
    )


def _token_ids_of(run: Run) -> TokenIds:
    """Return the token ids of a run's only prompt, if they were asked for, and of its completion."""
    reports = [prompt.report for _, prompt, _ in run.stats.parts if prompt.report is not None]
    prompt = reports[0].token_ids if reports else None
    return TokenIds(prompt=prompt or (), drawn=run.token_ids(0, most=MAX_DRAWN))


def _listed(tally: Tally) -> ListedVersion:
    first_s, token_s = (median(times) if times else None for times in tally.times.values())
    return ListedVersion(requests=tally.num_requests, errors=tally.num_errors, first_token_s=first_s, token_s=token_s)
