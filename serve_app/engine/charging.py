"""Charges a step that was computed to the flows whose sequences were in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Items

from serve_app.core.delta import Delta
from serve_app.core.shares import Share
from serve_app.engine.batch import Batch
from serve_app.engine.fairness.counters import Counters


def charge(batch: Batch, deltas: Items[Delta], counters: Counters, *, since_ns: int) -> None:
    """What was found cached is in no batch, and so is not charged.

    deltas:   what came of the batch
    since_ns: when the step began, on the clock of the accounts
    """
    rules, accounts = counters.rules, counters.accounts
    rows: defaultdict[str, int] = defaultdict(int)
    services: defaultdict[Share, float] = defaultdict(float)
    flows: dict[str, str] = {}
    for span in batch.spans:
        request, num_rows = span.sequence.request, span.num_computed
        share = request.share
        rows[share.flow] += num_rows
        drawn = rules.decode_weight if span.samples else 0.0
        services[share] += drawn + rules.prefill_weight * (num_rows - span.decodes)
        flows[request.request_id] = share.flow
    accounts.note_step(rows, since_ns=since_ns)
    for share, service in services.items():
        counters.charge(share, service)
    generated: defaultdict[str, int] = defaultdict(int)
    for delta in deltas:
        generated[flows[delta.request_id]] += len(delta.token_ids)
    for flow, number in generated.items():
        accounts.note_generated(flow, number)
