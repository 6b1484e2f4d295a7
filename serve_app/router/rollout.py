"""Judges a canary: compares its requests with those of the version beside it, and says widen, roll back or wait."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Literal, get_args

from serve_app.core.bounded import Amount, Part, PositiveFloat, PositiveInt

Z = 3.0
"""Standard errors by which a difference must exceed what is allowed: 1 of 740 equal canaries is worse by chance."""
MIN_ERRORS = 3
"""Failed requests before a canary is rolled back for them."""
MIN_TIMED = 10
"""Requests of each version whose times are compared."""
MIN_SCORED = 8
"""Scored requests before their divergence says anything."""
MAX_KEPT = 1000
"""Times and divergences that are kept, the newest ones."""
MIN_SLOWER_S = {"first token": 0.05, "time per token": 0.005}
"""Medians that differ by less are alike, whatever their ratio is."""
MAX_DIVERGENCE = 50.0
"""One request counts as no more, nats per token."""

Decision = Literal["widen", "roll back", "hold"]
DECISIONS: tuple[Decision, ...] = get_args(Decision)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How a canary becomes what its name means, or ends.

    steps:    shares that it gets one after the other; behind the last it gets all requests
    requests: of each version, at each step, before it gets the next share
    hold_after_s: a canary that has had its share for so long is held: it keeps its share until there are enough
              requests, and you are told. Nothing is concluded from too few
    max_error_increase: it may fail so many more of its requests; 0.01 is one of a hundred
    max_slowdown:   its median first token and time per token may take so many times as long
    max_divergence: mean difference of the log-probabilities that both versions give to the same tokens, in nats per
                    token. One that was trained further differs by some tenths, a broken one by several
    """

    steps: tuple[Part, ...] = (0.05, 0.25, 0.5)
    requests: PositiveInt = 50
    hold_after_s: PositiveFloat = 86_400.0
    max_error_increase: Amount = 0.01
    max_slowdown: PositiveFloat = 2.0
    max_divergence: PositiveFloat = 1.0

    def after(self, share: float) -> float:
        """Return the share that follows a share."""
        return min((step for step in self.steps if step > share), default=1.0)


def _few() -> deque[float]:
    return deque(maxlen=MAX_KEPT)


@dataclass(slots=True, kw_only=True)
class Tally:
    """The requests of one version. times: seconds, by what they are of"""

    num_requests: int = 0
    num_errors: int = 0
    times: dict[str, deque[float]] = field(default_factory=lambda: {of: _few() for of in MIN_SLOWER_S})

    @property
    def error_rate(self) -> float:
        return self.num_errors / max(1, self.num_requests)

    def note(self, *, is_error: bool, first_s: float | None = None, token_s: float | None = None) -> None:
        """Count a request. Its times are None if it failed, or had too few tokens."""
        self.num_requests += 1
        self.num_errors += is_error
        for seconds, times in zip((first_s, token_s), self.times.values(), strict=True):
            if seconds is not None:
                times.append(seconds)


@dataclass(slots=True, kw_only=True)
class Comparison:
    """What is known of a canary at one step.

    divergences:  of each scored request, nats per token
    num_scorable: requests that could have been scored
    """

    canary: Tally = field(default_factory=Tally)
    beside: Tally = field(default_factory=Tally)
    divergences: deque[float] = field(default_factory=_few)
    num_scorable: int = 0

    def score(self, own: Sequence[float], other: Sequence[float]) -> None:
        """Count the log-probabilities of a request's tokens, under the version that drew them and under the other."""
        mean = fmean(own) - fmean(other)
        self.divergences.append(min(MAX_DIVERGENCE, max(-MAX_DIVERGENCE, mean)) if mean == mean else MAX_DIVERGENCE)

    def __str__(self) -> str:
        """Return the figures in words, for events."""
        told = [
            f"{self.canary.num_errors} of {self.canary.num_requests} requests failed"
            f" ({self.beside.num_errors} of {self.beside.num_requests} of the version beside it)"
        ]
        for of in MIN_SLOWER_S:
            new, old = self.canary.times[of], self.beside.times[of]
            if new and old:
                told.append(f"median {of} {median(new):.3g} s ({median(old):.3g} s)")
        if self.divergences:
            mean, num_scored = fmean(self.divergences), len(self.divergences)
            told.append(f"divergence {mean:.3g} nats per token over {num_scored} requests")
        return ", ".join(told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of a canary, and why."""

    decision: Decision
    reason: str


def judge(found: Comparison, settings: RolloutSettings) -> Verdict | None:
    """Roll back as soon as it is sure that the canary is worse; widen after so many requests if nothing says that.

    None is to wait for more requests.

    Times are compared once a step, when it has enough requests: who looks often enough finds any difference.
    """
    worse = _fails_more(found, settings) or _diverges(found, settings)
    has_enough = min(found.canary.num_requests, found.beside.num_requests) >= settings.requests
    if not worse and has_enough:
        worse = next((why for of in MIN_SLOWER_S if (why := _is_slower(found, of, settings))), "")
    if worse:
        return Verdict(decision="roll back", reason=f"{worse}: {found}")
    is_scored = len(found.divergences) >= min(MIN_SCORED, settings.requests) or not found.num_scorable
    if not has_enough or not is_scored:
        return None
    return Verdict(decision="widen", reason=f"no worse: {found}")


def lacking(found: Comparison, settings: RolloutSettings) -> str:
    """Return in words what a comparison has of what it needs."""
    least = settings.requests
    told = f"{found.canary.num_requests} of it, {found.beside.num_requests} of the version beside it"
    scored = f"; {len(found.divergences)} of {min(MIN_SCORED, least)} are scored" if found.num_scorable else ""
    return f"requests that came to this router: {told}; {least} of each are needed{scored}"


def _fails_more(found: Comparison, settings: RolloutSettings) -> str:
    """Compare error rates by the lower limit of their difference (Newcombe 1998, method 10, of Wilson's intervals)."""
    new, old = found.canary, found.beside
    if new.num_errors < MIN_ERRORS:
        return ""
    low, _ = wilson(new.num_errors, new.num_requests)
    _, high = wilson(old.num_errors, old.num_requests)
    increase = new.error_rate - old.error_rate
    least = increase - math.hypot(new.error_rate - low, high - old.error_rate)
    return f"fails {increase:.1%} more of its requests" if least > settings.max_error_increase else ""


def _diverges(found: Comparison, settings: RolloutSettings) -> str:
    """Compare the mean divergence, less its standard errors, with the bound."""
    values = found.divergences
    if len(values) < MIN_SCORED:
        return ""
    least = fmean(values) - Z * stdev(values) / math.sqrt(len(values))
    return "its log-probabilities diverge" if least > settings.max_divergence else ""


def _is_slower(found: Comparison, of: str, settings: RolloutSettings) -> str:
    """Compare medians, and whether times of the canary are later in the common order (Mann and Whitney's U)."""
    new, old = found.canary.times[of], found.beside.times[of]
    if min(len(new), len(old)) < MIN_TIMED:
        return ""
    slower, usual = median(new), median(old)
    is_large = slower > settings.max_slowdown * usual and slower - usual > MIN_SLOWER_S[of]
    ratio = slower / max(usual, 1e-9)
    return f"its {of} takes {ratio:.3g} times as long" if is_large and mann_whitney(new, old) > Z else ""


def wilson(num_hits: int, num_tries: int) -> tuple[float, float]:
    """Return Wilson's interval of a rate, `Z` standard errors wide to both sides; (0, 1) if nothing was tried."""
    if not num_tries:
        return 0.0, 1.0
    rate, square = num_hits / num_tries, Z * Z / num_tries
    middle = rate + square / 2
    half = Z * math.sqrt(rate * (1 - rate) / num_tries + square / (4 * num_tries))
    return (middle - half) / (1 + square), (middle + half) / (1 + square)


def mann_whitney(new: Sequence[float], old: Sequence[float]) -> float:
    """Return by how many standard errors the new values are later in the common order than chance has it."""
    at: dict[float, list[int]] = {}
    for place, value in enumerate(sorted([*new, *old]), start=1):
        at.setdefault(value, []).append(place)
    num_new, num_old = len(new), len(old)
    above = sum(fmean(at[value]) for value in new) - num_new * (num_new + 1) / 2
    error = math.sqrt(num_new * num_old * (num_new + num_old + 1) / 12)
    return (above - num_new * num_old / 2) / error
