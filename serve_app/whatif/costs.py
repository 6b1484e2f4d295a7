"""What a step costs: a price for each kind of work in it, fitted to what was measured of a running service."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from serve_app.whatif.trace import Unusable

SWEEPS = 20_000
SMALLEST = 1e-12


class Work(NamedTuple):
    """The work of steps.

    steps:    how many;  rows: sequences that decode, summed over steps
    prompt_tokens: computed;  prompt_pairs: of a prompt's token and one before it
    chunks:   of prompts: each step computes one of every prompt that it goes on with
    context:  tokens that rows attend to
    adapters: different ones in a step, summed over steps
    """

    steps: float = 0.0
    prompt_tokens: float = 0.0
    prompt_pairs: float = 0.0
    rows: float = 0.0
    context: float = 0.0
    adapters: float = 0.0
    chunks: float = 0.0

    def plus(self, more: Work, *, times: float = 1.0) -> Work:
        """Return both together."""
        return Work(*(own + times * other for own, other in zip(self, more, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of each kind of work, and what else a measurement told.

    request_s:   a request's way to the engine and back, outside of steps
    load_s:      to bring an adapter into a slot
    num_blocks:  of a replica's key/value store;  block_bytes: of each
    error:       mean relative error of the fit over its observations
    """

    steps: float
    prompt_tokens: float
    rows: float
    prompt_pairs: float = 0.0
    context: float = 0.0
    adapters: float = 0.0
    chunks: float = 0.0
    request_s: float = 0.0
    load_s: float = 0.2
    num_blocks: int = 4096
    block_bytes: int = 0
    error: float = 0.0

    def of(self, work: Work) -> float:
        """Return the seconds that such work takes."""
        return sum(float(getattr(self, name)) * amount for name, amount in zip(Work._fields, work, strict=True))

    def told(self, observed: Observation) -> float:
        """Return the seconds that a burst takes by these costs."""
        return self.request_s + self.of(observed.work)

    def write(self, file: str) -> None:
        Path(file).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: str) -> StepCosts:
        """Raises Unusable."""
        try:
            found = json.loads(Path(file).read_text(encoding="utf-8"))
            found.pop("copied", None)  # of earlier versions, which copied cached blocks
            costs = cls(**found)
            numbers = [float(value) for value in asdict(costs).values()]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise Unusable(f"{file} holds no costs of steps, as `serve_app whatif fit` writes them: {error}") from error
        if costs.steps <= 0 or costs.num_blocks < 1 or min(numbers) < 0 or not all(map(math.isfinite, numbers)):
            raise Unusable(f"{file}: a step must cost some time, nothing less than none, and a replica needs blocks")
        return costs


class Observation(NamedTuple):
    """A burst of requests: its work, and the seconds from the first request sent to the last answer."""

    work: Work
    seconds: float


def fit(observations: Sequence[Observation]) -> StepCosts:
    """Return the costs, none below zero, with the least squares of relative errors.

    Raises Unusable where there are fewer observations than kinds of work in them.
    """
    rows = [[1.0, *each.work] for each in observations]
    used = [at for at in range(len(Work._fields) + 1) if any(row[at] for row in rows)]
    if len(observations) < len(used):
        raise Unusable(f"{len(used)} kinds of work need as many observations; found {len(observations)}")
    scaled = [[row[at] / each.seconds for at in used] for row, each in zip(rows, observations, strict=True)]
    found = dict(zip(used, _least_squares(scaled), strict=True))
    request_s, *prices = [found.get(at, 0.0) for at in range(len(Work._fields) + 1)]
    costs = StepCosts(**dict(zip(Work._fields, prices, strict=True)), request_s=request_s)  # type: ignore[arg-type]
    return replace(costs, error=mean(abs(costs.told(each) / each.seconds - 1) for each in observations))


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the weights >= 0 by which the columns of each row add up to 1 as nearly as can be.

    Goes along one axis after the other (coordinate descent), which finds the one least sum of squares.
    """
    columns = list(zip(*rows, strict=True))
    sizes = [max(sum(x * x for x in column) ** 0.5, SMALLEST) for column in columns]
    unit = [[x / size for x in column] for column, size in zip(columns, sizes, strict=True)]
    gram = [[sum(x * y for x, y in zip(a, b, strict=True)) for b in unit] for a in unit]
    target = [sum(column) for column in unit]
    weights = [0.0] * len(unit)
    for _ in range(SWEEPS):
        for at, row in enumerate(gram):
            pull = target[at] - sum(g * w for g, w in zip(row, weights, strict=True))
            weights[at] = max(0.0, weights[at] + pull)
    return [weight / size for weight, size in zip(weights, sizes, strict=True)]
