"""Who the engine's time and tokens went to: every nanosecond is a flow's or nobody's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from threading import Lock

from serve_app.core.flow_usage import REST, FlowUsage, UsageReport

MAX_FLOWS = 1024
"""Told by name; flows that come later share one account."""


@dataclass(slots=True)
class Account:
    """Of one flow; the fields are those of a FlowUsage."""

    engine_ns: int = 0
    num_rows: int = 0
    num_cached: int = 0
    num_generated: int = 0
    num_swaps: int = 0
    service: float = 0.0


class Accounts:
    """Written by the engine's thread, read by any.

    clock_ns: monotonic
    """

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.now_ns = clock_ns
        self._began_ns = self._until_ns = clock_ns()
        self._accounts: dict[str, Account] = {}
        self._lock = Lock()

    def note_step(self, rows: Mapping[str, int], services: Mapping[str, float], *, since_ns: int) -> None:
        """Divide a step that ends now by the rows of each flow; what rounding takes from one the next one has."""
        with self._lock:
            until_ns = self.now_ns()
            spent_ns, total, before = until_ns - since_ns, sum(rows.values()), 0
            for flow, num_rows in rows.items():
                account = self._of(flow)
                account.engine_ns += spent_ns * (before + num_rows) // total - spent_ns * before // total
                account.num_rows += num_rows
                account.service += services[flow]
                before += num_rows
            self._until_ns = until_ns

    def note_service(self, flow: str, service: float, *, num_swaps: int = 0) -> None:
        """What a flow was charged, in units of service."""
        with self._lock:
            account = self._of(flow)
            account.service += service
            account.num_swaps += num_swaps

    def note_cached(self, flow: str, num_tokens: int) -> None:
        """Tokens of a prompt that were found computed."""
        with self._lock:
            self._of(flow).num_cached += num_tokens

    def note_generated(self, flow: str, num_tokens: int) -> None:
        """Tokens that a client is told."""
        with self._lock:
            self._of(flow).num_generated += num_tokens

    def report(self, *, gap: float = 0.0) -> UsageReport:
        """To the end of the last step, the flows in the order in which they came."""
        with self._lock:
            elapsed_ns = self._until_ns - self._began_ns
            flows = tuple(FlowUsage(flow=flow, **asdict(account)) for flow, account in self._accounts.items())
        idle_ns = elapsed_ns - sum(usage.engine_ns for usage in flows)
        return UsageReport(elapsed_ns=elapsed_ns, idle_ns=idle_ns, flows=flows, gap=gap)

    def _of(self, flow: str) -> Account:
        if flow not in self._accounts and len(self._accounts) >= MAX_FLOWS:
            flow = REST
        return self._accounts.setdefault(flow, Account())
