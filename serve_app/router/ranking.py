"""Chooses among the completions of a prompt, where a client asked for the best of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import BestOf
from serve_app.api.responses import Choice
from serve_app.router.event import Event


@dataclass(slots=True)
class Score:
    """How likely a completion is, by the tokens whose text is shown and the one that ended it."""

    total: float = 0.0
    num_tokens: int = 0

    @property
    def mean(self) -> float:
        """Log-probability per token; a completion without any ranks behind all others."""
        return self.total / self.num_tokens if self.num_tokens else float("-inf")

    def add(self, event: Event) -> None:
        for entry in event.delta.logprobs:
            assert entry.logprob is not None, "a generated token has a log-probability"
            self.total += entry.logprob
            self.num_tokens += 1


def best_choices(request: CompletionRequest, choices: Sequence[Choice], scores: Sequence[Score]) -> list[Choice]:
    """Of each prompt as many as are returned, the best first.

    choices, scores: of every completion, by index

    OpenAI's `best_of` compares by mean and numbers anew; mistral.rs compares by sum and keeps the indices.
    """
    best: list[Choice] = []
    for part in range(request.num_parts):
        first = part * request.num_candidates
        places = sorted(
            range(first, first + request.num_candidates), key=lambda place: _key(request, scores[place]), reverse=True
        )
        best += [choices[place] for place in places[: request.num_returned]]
    if request.dialect.best_of is BestOf.CANDIDATES:
        return [replace(choice, index=index) for index, choice in enumerate(best)]
    return best


def _key(request: CompletionRequest, score: Score) -> float:
    return score.total if request.dialect.best_of is BestOf.RETURNED and score.num_tokens else score.mean
