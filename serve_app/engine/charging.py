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
    virtual: dict[str, float] = {}
    for span in batch.spans:
        share, num_rows = span.sequence.request.share, span.num_computed
        service = rules.prefill_weight * (num_rows - span.decodes) + (rules.decode_weight if span.samples else 0.0)
        flow = share.flow
        rows[flow] = rows.get(flow, 0) + num_rows
        services[flow] = services.get(flow, 0.0) + service
        virtual[flow] = virtual.get(flow, 0.0) + service / share.weight
    for flow, raised in virtual.items():
        counters.raise_by(flow, raised)
    accounts.note_step(rows, services, since_ns=since_ns)
    for flow, number in _generated(batch, deltas, flows=list(rows)).items():
        accounts.note_generated(flow, number)


def _generated(batch: Batch, deltas: Items[Delta], *, flows: Items[str]) -> dict[str, int]:
    """Tokens that clients are told, by flow; where there is one flow nobody has to be looked up."""
    if len(flows) == 1:
        return {flows[0]: sum(len(delta.token_ids) for delta in deltas)}
    flow_of = {span.sequence.request.request_id: span.sequence.request.share.flow for span in batch.spans}
    generated: dict[str, int] = {}
    for delta in deltas:
        flow = flow_of[delta.request_id]
        generated[flow] = generated.get(flow, 0) + len(delta.token_ids)
    return generated
