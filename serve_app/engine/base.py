"""What every engine does for its driver: the frame of a step, accounts, and news of what was spent."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence as Items

from serve_app.core.delta import Delta, FinishReason
from serve_app.core.errors import EngineFailed, ServeError
from serve_app.core.ledger import News, UsageReport
from serve_app.core.log_context import about
from serve_app.engine.config import EngineConfig
from serve_app.engine.sampling.output import Output
from serve_app.engine.scheduler.accounting import Accounts, note_ended
from serve_app.engine.scheduler.policy import FairShares
from serve_app.engine.scheduler.queue import WaitingQueue
from serve_app.engine.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)

MAX_TOLD = 512
"""Flows in one answer to a listener; of more it hears with the next ones."""
LOST = "the engine failed while it computed this request"


class BaseEngine(ABC):
    """An engine that advances by steps; another class says what a step is.

    is_stalled: the last step computed nothing, because all that waits waits for an adapter
    """

    def __init__(self, config: EngineConfig, output: Output) -> None:
        self.config, self._output, self._accounts = config, output, Accounts()
        self._policy = FairShares(config.fairness)
        self._waiting = WaitingQueue(self._policy)
        self._unsampled: list[Sequence] = []
        self.num_steps = self.num_failed_steps = self._num_told = 0
        self.step_s, self.is_stalled = 0.0, False

    @abstractmethod
    def _advance(self, deltas: list[Delta]) -> None:
        """Compute one batch; what it gives is added to `deltas` as it comes."""

    @abstractmethod
    def _give_up(self) -> list[Sequence]:
        """Let go of all sequences that run, and return them."""

    @property
    def usage(self) -> UsageReport:
        """Return what was computed for each flow, and where the time went; may be read by any thread."""
        return self._accounts.report(gap=self._policy.gap)

    def news(self, since: int) -> News:
        """Return what was spent since a listener heard the last news; may be asked by any thread."""
        return self._accounts.news(since, most=MAX_TOLD)

    def note_told(self) -> None:
        """Note that the load as it is now was sent: what was spent until now is told of no more."""
        self._num_told = self._accounts.num_changes

    def add(self, sequences: Items[Sequence]) -> None:
        """Queue the sequences of one request; the first computes the prompt, the others are its forks."""
        first, *first.forks = sequences
        if first.max_tokens == 0 and not first.scores_prompt and first.record is None:
            self._unsampled.append(first)
        else:
            self._waiting.push(first)

    def go_on(self, sequence: Sequence) -> None:
        """Have a new sequence go on where it was begun elsewhere; any thread may ask."""
        self._output.go_on(sequence)

    def step(self) -> list[Delta]:
        """Compute one batch and return what every sequence gained.

        A failure ends the sequences that were running with an error each and leaves the engine empty and usable.
        """
        deltas = [delta for leader in self._unsampled for delta in self._output.finish_unsampled(leader)]
        note_ended(self._unsampled, self._accounts)
        self._unsampled.clear()
        try:
            self._advance(deltas)
        except Exception:
            self.num_failed_steps += 1
            lost = self._give_up()
            extra = about(sequence.request.client_request_id for sequence in lost)
            logger.exception("a step of %d running sequences failed", len(lost), extra=extra)
            deltas += self._lose(lost, EngineFailed(LOST))
        return deltas

    def _lose(self, sequences: Items[Sequence], error: ServeError) -> list[Delta]:
        """End sequences, and what was to follow them, with an error each."""
        deltas = []
        for sequence in sequences:
            note_ended([sequence], self._accounts)
            for lost in (sequence, *sequence.forks):
                if not lost.is_finished:
                    lost.end(FinishReason.ERROR)
                    deltas.append(Delta(request_id=lost.request.request_id, sample=lost.sample, error=error))
            sequence.forks = []
        return deltas
