"""Charges a step that was computed to the flows whose sequences were in it."""

from __future__ import annotations

from collections.abc import Sequence as Items

from serve_app.core.delta import Delta
from serve_app.engine.batch import Batch
from serve_app.engine.fairness.counters import Counters


def charge(batch: Batch, deltas: Items[Delta], counters: Counters, *, since_ns: int) -> None:
    """What was found cached is in no batch, and so is not charged.

    deltas:   what came of the batch
    since_ns: when the step began, on the clock of the accounts
    """
    rules, accounts = counters.rules, counters.accounts
    rows: dict[str, int] = {}
    services: dict[str, float] = {}
    flows: dict[str, str] = {}
    for span in batch.spans:
        request, num_rows = span.sequence.request, span.num_computed
        share = request.share
        flow = flows[request.request_id] = share.flow
        service = rules.prefill_weight * (num_rows - span.decodes) + (rules.decode_weight if span.samples else 0.0)
        counters.raise_by(flow, service / share.weight)
        rows[flow] = rows.get(flow, 0) + num_rows
        services[flow] = services.get(flow, 0.0) + service
    accounts.note_step(rows, services, since_ns=since_ns)
    generated: dict[str, int] = {}
    for delta in deltas:
        if delta.token_ids:
            flow = flows[delta.request_id]
            generated[flow] = generated.get(flow, 0) + len(delta.token_ids)
    for flow, number in generated.items():
        accounts.note_generated(flow, number)
