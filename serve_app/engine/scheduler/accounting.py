"""Accounting: every nanosecond of the engine belongs to a flow or to nobody, every token to a flow.

For each step `attribute`

1. divides the step's time by the rows of each span;
2. charges the policy for what was computed;
3. counts the tokens that its sequences gained;
4. adds all of it to the flows' accounts, which the ledger and the metrics are told of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from threading import Lock
from typing import TYPE_CHECKING

from serve_app.core.delta import Delta
from serve_app.core.ledger import REST, FlowUsage, News, Spent, UsageReport

if TYPE_CHECKING:
    from serve_app.engine.scheduler.policy import FairShares
    from serve_app.engine.scheduler.sequence import Batch, Sequence

MAX_FLOWS = 1024
"""Reported by name, the first that came; all others together."""


@dataclass(slots=True)
class Account:
    """What was spent for one flow: since the beginning, or in one step.

    prompt_tokens:     of prompts that clients were told of, cached ones included, or computed and given up
    completion_tokens: generated ones, whatever becomes of them
    changed_at:        number of the last change; greater than that of all accounts that changed before
    """

    engine_ns: int = 0
    num_rows: int = 0
    num_swaps: int = 0
    service: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    changed_at: int = 0

    def add(self, part: Account, *, sign: int = 1) -> None:
        self.engine_ns += sign * part.engine_ns
        self.num_rows += sign * part.num_rows
        self.num_swaps += sign * part.num_swaps
        self.service += sign * part.service
        self.prompt_tokens += sign * part.prompt_tokens
        self.cached_tokens += sign * part.cached_tokens
        self.completion_tokens += sign * part.completion_tokens


class Accounts:
    """The accounts of all flows that ever asked. Written by the engine's thread, read by any.

    clock_ns: monotonic
    """

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.now_ns = clock_ns
        self._began_ns = self._until_ns = clock_ns()
        self._accounts: dict[str, Account] = {}  # in the order in which flows came
        self._by_change: dict[str, None] = {}
        self._all = Account()
        self._lock = Lock()

    @property
    def num_changes(self) -> int:
        """Return the number of the last change."""
        return self._all.changed_at

    @property
    def num_generated(self) -> int:
        """Return the tokens that all flows generated so far."""
        return self._all.completion_tokens

    def note_step(self, parts: Mapping[str, Account], *, until_ns: int) -> None:
        """Add a step that ended then, as divided among flows."""
        with self._lock:
            for flow, part in parts.items():
                self._add(flow, part)
            self._until_ns = until_ns

    def note(self, flow: str, part: Account) -> None:
        """Add what was spent for a flow beside the steps."""
        with self._lock:
            self._add(flow, part)

    def report(self, *, gap: float = 0.0) -> UsageReport:
        """Return usage to the end of the last step, the flows in the order in which they came."""
        with self._lock:
            rest = replace(self._all)
            flows = []
            for flow, account in islice(self._accounts.items(), MAX_FLOWS):
                flows.append(_usage(flow, account))
                rest.add(account, sign=-1)
            if len(self._accounts) > MAX_FLOWS:
                rest.service = max(0.0, rest.service)
                flows.append(_usage(REST, rest))
            elapsed_ns = self._until_ns - self._began_ns
            idle_ns = elapsed_ns - self._all.engine_ns
        return UsageReport(elapsed_ns=elapsed_ns, idle_ns=idle_ns, flows=tuple(flows), gap=gap)

    def spent_since(self, change: int) -> tuple[Spent, ...]:
        """Return the totals of the flows whose accounts have changed since then; O(of them)."""
        with self._lock:
            return tuple(_spent(flow, self._accounts[flow]) for flow in self._changed_since(change))

    def news(self, since: int, *, most: int) -> News:
        """Return what a listener lacks that heard all until `since`: those that changed first, `most` of them."""
        with self._lock:
            flows = list(self._changed_since(since))[::-1][:most]
            until = self._accounts[flows[-1]].changed_at if flows else since
            return News(spent=tuple(_spent(flow, self._accounts[flow]) for flow in flows), until=until)

    def _changed_since(self, change: int) -> Iterator[str]:
        """Iterate from the last change back."""
        return takewhile(lambda flow: self._accounts[flow].changed_at > change, reversed(self._by_change))

    def _add(self, flow: str, part: Account) -> None:
        account = self._accounts.setdefault(flow, Account())
        for each in (account, self._all):
            each.add(part)
        self._all.changed_at += 1
        account.changed_at = self._all.changed_at
        self._by_change.pop(flow, None)
        self._by_change[flow] = None


def attribute(batch: Batch, policy: FairShares, accounts: Accounts, *, since_ns: int) -> int:
    """Attribute a step that ends now to its flows and sequences; return its nanoseconds.

    since_ns: when it began, on the clock of the accounts

    What rounding takes from one span the next one has. What was found cached is in no batch, and so is not charged.
    """
    rules, until_ns = policy.rules, accounts.now_ns()
    step_ns = until_ns - since_ns
    num_rows, rows_before, ns_before = sum(span.num_computed for span in batch.spans), 0, 0
    parts: dict[str, Account] = {}
    for span in batch.spans:
        sequence, own_rows = span.sequence, span.num_computed
        share = sequence.request.share
        part = parts.setdefault(share.flow, Account())
        rows_before += own_rows
        ns_now = step_ns * rows_before // num_rows
        sequence.spent.engine_ns += ns_now - ns_before
        part.engine_ns += ns_now - ns_before
        part.num_rows += own_rows
        ns_before = ns_now
        service = rules.prefill_weight * (own_rows - span.decodes) + (rules.decode_weight if span.samples else 0.0)
        part.service += service
        policy.charge(share, service)
        _count_tokens(sequence, part)
    accounts.note_step(parts, until_ns=until_ns)
    return step_ns


def note_ended(sequences: Iterable[Sequence], accounts: Accounts) -> None:
    """Count the tokens of sequences that end in no step, and what was computed of prompts no client was told of."""
    for sequence in sequences:
        account = Account()
        _count_tokens(sequence, account)
        if sequence.sample == 0 and not sequence.spent.is_prompt_counted and sequence.num_computed:
            sequence.spent.is_prompt_counted = True
            account.prompt_tokens += min(sequence.num_computed, sequence.prompt_length)
            account.cached_tokens += min(sequence.place.num_cached_tokens, account.prompt_tokens)
        accounts.note(sequence.request.share.flow, account)


def with_times(deltas: Iterable[Delta], batch: Batch) -> list[Delta]:
    """Return the deltas, the finishes among them with the engine's time that their sequences took."""
    ended = [span.sequence for span in batch.spans if span.sequence.is_finished]
    times = {(each.request.request_id, each.sample): each.spent.engine_ns for each in ended}
    return [
        replace(delta, finish=replace(delta.finish, engine_ns=engine_ns))
        if delta.finish is not None and (engine_ns := times.get((delta.request_id, delta.sample), 0))
        else delta
        for delta in deltas
    ]


def _count_tokens(sequence: Sequence, account: Account) -> None:
    """Add what a sequence gained since the last count: generated tokens, and its prompt once its client knows of it."""
    completion = max(0, sequence.num_taken - sequence.spent.num_counted)  # drawn again, and counted elsewhere
    sequence.spent.num_counted += completion
    account.completion_tokens += completion
    if sequence.shown.is_prompt_reported and not sequence.spent.is_prompt_counted:
        sequence.spent.is_prompt_counted = True
        account.prompt_tokens += sequence.prompt_length
        account.cached_tokens += sequence.place.num_cached_tokens


def _usage(flow: str, account: Account) -> FlowUsage:
    return FlowUsage(
        flow=flow,
        engine_ns=account.engine_ns,
        num_rows=account.num_rows,
        num_cached=account.cached_tokens,
        num_generated=account.completion_tokens,
        num_swaps=account.num_swaps,
        service=account.service,
    )


def _spent(flow: str, account: Account) -> Spent:
    return Spent(
        flow=flow,
        prompt_tokens=account.prompt_tokens,
        cached_tokens=account.cached_tokens,
        completion_tokens=account.completion_tokens,
        engine_ns=account.engine_ns,
    )
