"""What an engine spent for each flow: tokens as clients are told of them, and the time of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from serve_app.core.delta import Delta
from serve_app.core.ledger import Spent
from serve_app.engine.batch import Batch
from serve_app.engine.sequence import Sequence


class Spending:
    """Counts every token of a sequence once, when it is there, whatever becomes of it.

    by_flow: everything so far; replaced and never changed, so that any thread may read it
    """

    def __init__(self) -> None:
        self.by_flow: Mapping[str, Spent] = {}

    @property
    def told(self) -> tuple[Spent, ...]:
        return tuple(self.by_flow.values())

    def note(self, sequences: Iterable[Sequence]) -> None:
        """Count what they got since the last time."""
        for sequence in sequences:
            prompt, cached = _new_prompt_tokens(sequence)
            completion = sequence.num_taken - sequence.num_charged
            if prompt or completion:
                sequence.num_charged += completion
                self._add(sequence.request.share.flow, prompt=prompt, cached=cached, completion=completion)

    def note_given_up(self, sequences: Iterable[Sequence]) -> None:
        """Count also what was computed of prompts of which nobody was told yet."""
        for sequence in sequences:
            self.note([sequence])
            if sequence.sample == 0 and not sequence.is_prompt_charged and sequence.num_computed:
                sequence.is_prompt_charged = True
                computed = min(sequence.num_computed, sequence.prompt_length)
                cached = min(sequence.num_cached_tokens, computed)
                self._add(sequence.request.share.flow, prompt=computed, cached=cached)

    def note_step(self, batch: Batch, step_ns: int) -> None:
        """Share a step's time out among its tokens, guesses included, to the nanosecond."""
        num_left, ns_left = sum(span.num_computed for span in batch.spans), step_ns
        by_flow: dict[str, int] = {}
        for span in batch.spans:
            part = ns_left * span.num_computed // num_left
            num_left, ns_left = num_left - span.num_computed, ns_left - part
            span.sequence.engine_ns += part
            flow = span.sequence.request.share.flow
            by_flow[flow] = by_flow.get(flow, 0) + part
        for flow, part in by_flow.items():
            self._add(flow, engine_ns=part)

    def _add(self, flow: str, *, prompt: int = 0, cached: int = 0, completion: int = 0, engine_ns: int = 0) -> None:
        before = self.by_flow.get(flow) or Spent(flow=flow)
        after = Spent(
            flow=flow,
            prompt_tokens=before.prompt_tokens + prompt,
            cached_tokens=before.cached_tokens + cached,
            completion_tokens=before.completion_tokens + completion,
            engine_ns=before.engine_ns + engine_ns,
        )
        self.by_flow = {**self.by_flow, flow: after}


def with_times(deltas: Iterable[Delta], batch: Batch) -> list[Delta]:
    """The same, the finishes with the engine's time that their sequences took."""
    ended = {
        (each.request.request_id, each.sample): each.engine_ns
        for each in (span.sequence for span in batch.spans)
        if each.is_finished
    }
    return [_with_time(delta, ended.get((delta.request_id, delta.sample), 0)) for delta in deltas]


def _with_time(delta: Delta, engine_ns: int) -> Delta:
    if delta.finish is None or not engine_ns:
        return delta
    return replace(delta, finish=replace(delta.finish, engine_ns=engine_ns))


def _new_prompt_tokens(sequence: Sequence) -> tuple[int, int]:
    """Tokens of its prompt and those of them that were cached, once it was told of them."""
    if sequence.is_prompt_charged or not sequence.was_reported:
        return 0, 0
    sequence.is_prompt_charged = True
    return sequence.prompt_length, sequence.num_cached_tokens
