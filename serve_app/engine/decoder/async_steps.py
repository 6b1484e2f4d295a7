"""Asynchronous steps: launch one, overlap the next where that needs nothing of it but its tokens, and collect.

1. launch: begin the masks, have the runner compute, begin the draws;
2. overlap: on a device, prepare and launch the next step with the tokens as they lie there;
3. collect: wait for the draws and commit them; while guesses come true, draw and commit again.

What a token does to its text is known a step late. So a sequence that ends has computed a token too many, which is
dropped. Its keys and values lie beyond what counts as computed, and the next to come overwrites them.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, replace

from serve_app.core.delta import Delta
from serve_app.engine.decoder.recorder import Recorder
from serve_app.engine.decoder.runner import Runner
from serve_app.engine.kv.storage import Holding
from serve_app.engine.sampling.masks import MaskComputer
from serve_app.engine.sampling.sampler import Begun, Launched
from serve_app.engine.scheduler.scheduler import Scheduler
from serve_app.engine.scheduler.sequence import Batch, Sequence, Span
from serve_app.engine.speculation.verification import Verifier

UNKNOWN = 0
"""A token that only the device knows yet."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was launched.

    holdings: of each span's sequence, then
    before:   the draws that its tokens were taken from, and each span's row among them; None where the host knew them
    """

    batch: Batch
    begun: Begun
    holdings: Items[Holding | None]
    before: tuple[Launched, Items[int]] | None = None

    def standing(self) -> list[bool]:
        """Return of each span whether it still is what comes next of its sequence, which lost neither place nor draw.

        To be asked when the step before has been collected.
        """
        if self.before is None:  # nothing has happened since
            return [True] * len(self.batch.spans)
        launched, rows = self.before
        drawn = launched.tokens_on_device()
        facts = zip(self.batch.spans, self.holdings, rows, strict=True)
        return [_stands(span, holding, drawn[row]) for span, holding, row in facts]


class AsyncSteps:
    """Launches and collects an engine's steps, one behind the other.

    runs_ahead: whether a step may be launched before the last one is collected
    num_overlapped, num_dropped: steps launched so, and their tokens that were computed for nothing
    """

    def __init__(
        self,
        scheduler: Scheduler,
        masks: MaskComputer,
        recorder: Recorder,
        runner: Runner,
        verifier: Verifier,
        *,
        runs_ahead: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._masks = masks
        self._recorder = recorder
        self._runner = runner
        self._verifier = verifier
        self._next: LaunchedStep | None = None
        self.runs_ahead = runs_ahead
        self.num_overlapped = self.num_dropped = 0

    @property
    def is_ahead(self) -> bool:
        return self._next is not None

    def take_launched(self) -> LaunchedStep | None:
        """Return the step that was launched already, if any."""
        found, self._next = self._next, None
        return found

    def launch(self, batch: Batch) -> LaunchedStep:
        masks = self._masks.begin(batch)
        with self._recorder.watching(batch):
            logits = self._runner.forward(batch)
        begun = self._verifier.begin(logits, batch, masks)
        return LaunchedStep(batch, begun, [span.sequence.place.holding for span in batch.spans])

    def overlap(self, step: LaunchedStep) -> LaunchedStep:
        """Launch the step behind one that is not collected yet, if that is known; return the one, whose logits stay."""
        going = self._going_on(step) if self.runs_ahead else []
        launched = step.begun.launched
        if not going or launched is None:
            return step
        if self._runner.graphs is not None and any(not s.request.sampling.is_greedy for s, _ in step.begun.usual):
            step = replace(step, begun=replace(step.begun, logits=step.begun.logits.clone()))
        rows = [row for row, _ in going]
        with _presumed([span.sequence for _, span in going]):
            batch = Batch(tuple(Span(span.sequence, span.end, 1, samples=True) for _, span in going))
            begun = self._verifier.begin(self._runner.forward(batch, launched.take(rows)), batch, None)
        holdings = [span.sequence.place.holding for span in batch.spans]
        self._next = LaunchedStep(batch, begun, holdings, (launched, rows))
        self.num_overlapped += 1
        return step

    def collect(self, step: LaunchedStep) -> tuple[Batch, list[Delta]]:
        """Wait for a step; return what of it stands, and what that gave."""
        standing = step.standing()
        deltas = self._verifier.finish(step.begun, standing)
        spans = tuple(span for span, stands in zip(step.batch.spans, standing, strict=True) if stands)
        self.num_dropped += len(standing) - len(spans)
        return replace(step.batch, spans=spans), deltas

    def discard(self) -> None:
        """Drop what was launched."""
        self._next = None

    def _going_on(self, step: LaunchedStep) -> list[tuple[int, Span]]:
        """Return the spans, with their rows, that can be computed further with nothing but their next token.

        Return none if the scheduler might do anything else than go on with all.
        """
        scheduler, spans = self._scheduler, step.batch.spans
        if len(scheduler.waiting) or len(scheduler.running) != len(spans) or step.begun.others:
            return []
        if not all(_is_single(span) and _is_free(span.sequence) for span in spans) or not all(step.standing()):
            return []
        going = [
            (row, span) for row, span in enumerate(spans) if span.sequence.num_generated + 1 < span.sequence.max_tokens
        ]
        if not all(scheduler.reserve(span.sequence, span.sequence.num_tokens + 1) for _, span in going):
            return []
        return going


def _stands(span: Span, holding: Holding | None, token_id: int) -> bool:
    """token_id: which its token was on the device"""
    sequence = span.sequence
    if sequence.is_finished or sequence.place.holding is not holding or sequence.num_computed != span.start:
        return False
    return sequence.token_ids[span.start] == token_id


def _is_single(span: Span) -> bool:
    """Return whether it is a token of a text, and the next one is all that is wanted of it."""
    return span.decodes and span.samples and span.length == 1 and not span.scores and not span.draft


def _is_free(sequence: Sequence) -> bool:
    """Return whether the next draw depends on no token but by keys and values, and nothing else reads each token."""
    state = sequence.sampling_state
    sees_tokens = (state.repetition, state.occurrence, state.repeats, state.bad_words)
    is_watched = (sequence.matcher, sequence.record, sequence.illustration)
    if any(each is not None for each in (*sees_tokens, *is_watched)):
        return False
    return not (sequence.forks or sequence.prediction or sequence.num_held)


@contextmanager
def _presumed(sequences: Items[Sequence]) -> Iterator[None]:
    """Let each have the token that is being drawn, as far as counting goes."""
    for sequence in sequences:
        sequence.token_ids.append(UNKNOWN)
        sequence.num_computed += 1
    try:
        yield
    finally:
        for sequence in sequences:
            sequence.token_ids.pop()
            sequence.num_computed -= 1
