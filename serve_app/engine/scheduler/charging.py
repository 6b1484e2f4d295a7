"""Attributes a step to the flows and sequences that were in it: its time, rows and tokens, in one pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from serve_app.core.delta import Delta
from serve_app.engine.scheduler.accounts import Account
from serve_app.engine.scheduler.batch import Batch
from serve_app.engine.scheduler.counters import Counters
from serve_app.engine.scheduler.spending import count_tokens


def charge(batch: Batch, counters: Counters, *, since_ns: int) -> int:
    """Divide a step that ends now by the rows of each span, guesses included; returns its nanoseconds.

    since_ns: when it began, on the clock of the accounts

    What rounding takes from one span the next one has. What was found cached is in no batch, and so is not charged.
    """
    rules, accounts = counters.rules, counters.accounts
    until_ns = accounts.now_ns()
    step_ns = until_ns - since_ns
    num_rows, rows_before, ns_before = sum(span.num_computed for span in batch.spans), 0, 0
    parts: dict[str, Account] = {}
    for span in batch.spans:
        sequence, own_rows = span.sequence, span.num_computed
        share = sequence.request.share
        part = parts.get(share.flow)
        if part is None:
            part = parts[share.flow] = Account()
        rows_before += own_rows
        ns_now = step_ns * rows_before // num_rows
        sequence.engine_ns += ns_now - ns_before
        part.engine_ns += ns_now - ns_before
        part.num_rows += own_rows
        ns_before = ns_now
        service = rules.prefill_weight * (own_rows - span.decodes) + (rules.decode_weight if span.samples else 0.0)
        part.service += service
        counters.raise_by(share.flow, service / share.weight)
        count_tokens(sequence, part)
    accounts.note_step(parts, until_ns=until_ns)
    return step_ns


def with_times(deltas: Iterable[Delta], batch: Batch) -> list[Delta]:
    """The same, the finishes with the engine's time that their sequences took."""
    sequences = [span.sequence for span in batch.spans if span.sequence.is_finished]
    ended = {(each.request.request_id, each.sample): each.engine_ns for each in sequences}
    if not ended:
        return list(deltas)
    return [_with_time(delta, ended.get((delta.request_id, delta.sample), 0)) for delta in deltas]


def _with_time(delta: Delta, engine_ns: int) -> Delta:
    if delta.finish is None or not engine_ns:
        return delta
    return replace(delta, finish=replace(delta.finish, engine_ns=engine_ns))
