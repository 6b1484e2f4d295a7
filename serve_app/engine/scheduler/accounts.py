"""Who the engine's time and tokens went to: every nanosecond is a flow's or nobody's, every token is somebody's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from threading import Lock

from serve_app.core.ledger import REST, FlowUsage, News, Spent, UsageReport

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
