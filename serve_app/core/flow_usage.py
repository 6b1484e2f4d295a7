"""What a replica has computed for each flow, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass, replace

REST = "*"
"""Stands for all flows beyond those that are told by name; no flow is called so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowUsage:
    """Of one flow, since the replica began. Everything but the name adds up.

    engine_ns:     of steps, each divided by the rows that were computed in it
    num_rows:      tokens that went through the model: of prompts, generated ones, guesses; again after a preemption
    num_cached:    tokens of prompts that were found computed
    num_generated: tokens that its clients were told, shown or not
    num_swaps:     adapters that were brought for it
    service:       what it was charged: weighted tokens and swaps, not divided by its weight
    """

    flow: str
    engine_ns: int = 0
    num_rows: int = 0
    num_cached: int = 0
    num_generated: int = 0
    num_swaps: int = 0
    service: float = 0.0

    def plus(self, other: FlowUsage) -> FlowUsage:
        """Both together, under the name of this one."""
        return replace(
            self,
            engine_ns=self.engine_ns + other.engine_ns,
            num_rows=self.num_rows + other.num_rows,
            num_cached=self.num_cached + other.num_cached,
            num_generated=self.num_generated + other.num_generated,
            num_swaps=self.num_swaps + other.num_swaps,
            service=self.service + other.service,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """Of one replica: `elapsed_ns` is `idle_ns` and the time of all flows, to the nanosecond.

    elapsed_ns: from the engine's beginning to the end of its last step
    idle_ns:    of that, when nothing was computed, or nothing came of it
    gap:        between the highest and the lowest virtual counter of those flows that wait; 0 where fewer than two do
    """

    elapsed_ns: int = 0
    idle_ns: int = 0
    flows: tuple[FlowUsage, ...] = ()
    gap: float = 0.0

    def bounded(self, most: int) -> UsageReport:
        """The same with no more than `most` flows by name, the first ones, and all others as one."""
        if len(self.flows) <= most:
            return self
        named = {usage.flow: usage for usage in self.flows[:most] if usage.flow != REST}
        rest = FlowUsage(flow=REST)
        for usage in self.flows:
            if usage.flow not in named:
                rest = rest.plus(usage)
        return replace(self, flows=(*named.values(), rest))
