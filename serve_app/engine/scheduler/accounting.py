"""Accounting: every nanosecond of the engine belongs to a flow or to nobody, every token to a flow."""

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
    from serve_app.engine.scheduler.counters import Counters
    from serve_app.engine.scheduler.sequence import Batch, Sequence


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


def count_tokens(sequence: Sequence, account: Account) -> None:
    """Add what it got since the last time: generated tokens, and its prompt once it was told of that."""
    completion = sequence.num_taken - sequence.num_charged
    sequence.num_charged += completion
    account.completion_tokens += completion
    if sequence.was_reported and not sequence.is_prompt_charged:
        sequence.is_prompt_charged = True
        account.prompt_tokens += sequence.prompt_length
        account.cached_tokens += sequence.num_cached_tokens


def note_tokens(sequences: Iterable[Sequence], accounts: Accounts) -> None:
    """Of sequences that are in no step."""
    for sequence in sequences:
        account = Account()
        count_tokens(sequence, account)
        accounts.note(sequence.request.share.flow, account)


def note_given_up(sequences: Iterable[Sequence], accounts: Accounts) -> None:
    """Also what was computed of prompts of which nobody was told yet."""
    for sequence in sequences:
        account = Account()
        count_tokens(sequence, account)
        if sequence.sample == 0 and not sequence.is_prompt_charged and sequence.num_computed:
            sequence.is_prompt_charged = True
            account.prompt_tokens += min(sequence.num_computed, sequence.prompt_length)
            account.cached_tokens += min(sequence.num_cached_tokens, account.prompt_tokens)
        accounts.note(sequence.request.share.flow, account)


MAX_FLOWS = 1024
"""Reported by name, the first that came; all others together."""


@dataclass(slots=True)
class Account:
    """What was spent for one flow: since the beginning, or in one step.

    prompt_tokens:     of prompts that were told of, cached ones included, or computed and given up
    completion_tokens: that are there, whatever becomes of them
    changed_at:        number of the last change; greater than that of all that changed before
    """

    engine_ns: int = 0
    num_rows: int = 0
    num_swaps: int = 0
    service: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    changed_at: int = 0

    def add(self, part: Account) -> None:
        self.engine_ns += part.engine_ns
        self.num_rows += part.num_rows
        self.num_swaps += part.num_swaps
        self.service += part.service
        self.prompt_tokens += part.prompt_tokens
        self.cached_tokens += part.cached_tokens
        self.completion_tokens += part.completion_tokens


class Accounts:
    """The one tally of flows: of it the ledger is told, and the metrics. Written by the engine's thread, read by any.

    There are as many accounts as flows that ever asked.
    clock_ns: monotonic
    """

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.now_ns = clock_ns
        self._began_ns = self._until_ns = clock_ns()
        self._accounts: dict[str, Account] = {}
        self._by_change: dict[str, None] = {}
        self._all = Account()
        self._num_changes = 0
        self._lock = Lock()

    @property
    def num_changes(self) -> int:
        """So far: the number of the last one."""
        return self._num_changes

    @property
    def num_generated(self) -> int:
        """Tokens so far, of all flows."""
        return self._all.completion_tokens

    def note_step(self, parts: Mapping[str, Account], *, until_ns: int) -> None:
        """A step that ended then, as divided among flows."""
        with self._lock:
            for flow, part in parts.items():
                self._add(flow, part)
            self._until_ns = until_ns

    def note(self, flow: str, part: Account) -> None:
        """What was spent for a flow beside the steps."""
        with self._lock:
            self._add(flow, part)

    def service_of(self, flow: str) -> float:
        """What a flow was charged so far; for the engine's thread."""
        account = self._accounts.get(flow)
        return 0.0 if account is None else account.service

    def report(self, *, gap: float = 0.0) -> UsageReport:
        """To the end of the last step, the flows in the order in which they came."""
        with self._lock:
            elapsed_ns = self._until_ns - self._began_ns
            named = dict(islice(self._accounts.items(), MAX_FLOWS))
            flows = [_usage(flow, account) for flow, account in named.items()]
            if len(self._accounts) > MAX_FLOWS:
                flows.append(_usage(REST, _rest(self._all, named.values())))
            idle_ns = elapsed_ns - self._all.engine_ns
        return UsageReport(elapsed_ns=elapsed_ns, idle_ns=idle_ns, flows=tuple(flows), gap=gap)

    def spent_since(self, change: int) -> tuple[Spent, ...]:
        """By those flows whose accounts have changed since then; O(of them)."""
        with self._lock:
            return tuple(_spent(flow, self._accounts[flow]) for flow in self._changed_since(change))

    def news(self, since: int, *, most: int) -> News:
        """What a listener lacks that heard all until `since`: those that changed first, `most` of them."""
        with self._lock:
            flows = list(self._changed_since(since))[::-1][:most]
            until = self._accounts[flows[-1]].changed_at if flows else since
            return News(spent=tuple(_spent(flow, self._accounts[flow]) for flow in flows), until=until)

    def _changed_since(self, change: int) -> Iterator[str]:
        """The last one first."""
        return takewhile(lambda flow: self._accounts[flow].changed_at > change, reversed(self._by_change))

    def _add(self, flow: str, part: Account) -> None:
        account = self._accounts.get(flow)
        if account is None:
            account = self._accounts[flow] = Account()
        account.add(part)
        self._all.add(part)
        self._num_changes += 1
        account.changed_at = self._num_changes
        self._by_change.pop(flow, None)
        self._by_change[flow] = None


def _rest(whole: Account, parts: Iterable[Account]) -> Account:
    """What is left of the whole without these."""
    named = Account()
    for part in parts:
        named.add(part)
    return Account(
        engine_ns=whole.engine_ns - named.engine_ns,
        num_rows=whole.num_rows - named.num_rows,
        num_swaps=whole.num_swaps - named.num_swaps,
        service=max(0.0, whole.service - named.service),
        cached_tokens=whole.cached_tokens - named.cached_tokens,
        completion_tokens=whole.completion_tokens - named.completion_tokens,
    )


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
