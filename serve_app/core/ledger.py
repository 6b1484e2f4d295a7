"""Who used what: rows of requests, what replicas counted beside them, prices, sums, and reports as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from serve_app.core.bounded import Amount

UNATTRIBUTED = "unattributed"
"""The key id and status of usage that replicas counted for a tenant and no row explains."""

CLIENT_LEFT = 499
"""The status of a request whose client left before its answer; logged and counted, never sent."""

OTHER_MIXES = "*"
"""The adapter name in a day's sums for all adapter mixes without a line of their own."""
DIMENSIONS = ("tenant", "model", "adapter", "key_id", "day")
"""By which usage is asked for."""
SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "choices", "engine_ns", "cost")
"""What is added up."""
NANO_PER_TOKEN = 1000
"""A price of 1 per million tokens is so many billionths per token."""
REST = "*"
"""Stands for all flows that are not reported by name; no flow has this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a replica has spent for one flow since it started; it only grows.

    prompt_tokens:  of prompts that were told of, cached ones included, or computed and given up
    engine_ns:      of its steps, each shared out among the tokens that it computed
    """

    flow: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    engine_ns: int = 0

    def at_least(self, other: Spent) -> Spent:
        """Return the larger value of each count: the later of two reports."""
        numbers = (each.name for each in fields(self) if each.name != "flow")
        return replace(self, **{name: max(getattr(self, name), getattr(other, name)) for name in numbers})


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a replica spent for some flows since a router last heard of it.

    until: what to send with the next call, so that nothing is missed and nothing told twice
    """

    spent: tuple[Spent, ...] = ()
    until: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What one replica of a base model says that it spent for one flow."""

    replica_id: str
    model: str
    spent: Spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one request used of one model.

    id:         never the same for two; a row that comes again is the same row
    request_id: the client's own, where it sent one, and so not always one of its kind
    adapter, version: "" for the base
    at:         Unix seconds when it was over
    choices:    completions that ended
    queue_s:    of the prompt that waited longest;  prefill_s: from there to the first token;  decode_s: to the last
    engine_ns:  of the engine's steps, as far as completions that ended told
    cost:       in billionths of the currency
    status:     of the response, or of the error that a stream ended by: 499 where the client left
    """

    id: str
    tenant: str
    key_id: str
    request_id: str
    model: str
    adapter: str = ""
    version: str = ""
    at: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    choices: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    engine_ns: int = 0
    cost: int = 0
    status: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLine:
    """by: what was asked for by, in that order;  sums: by the names of SUMS"""

    by: Mapping[str, str]
    sums: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuestion:
    """tenant: None is all;  since, until: days like `2026-11-22`, both included; "" is no bound"""

    by: tuple[str, ...] = ("tenant", "model", "day")
    tenant: str | None = None
    since: str = ""
    until: str = ""


@dataclass(frozen=True, kw_only=True)
class Price:
    """Per million tokens, in the one currency of the configuration. cached: None is the price of other prompt tokens"""

    prompt: Amount = 0.0
    cached: Amount | None = None
    completion: Amount = 0.0

    def cost(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """Return the cost in billionths. `prompt_tokens` include the cached ones."""
        if self is FREE:
            return 0
        cached = self.prompt if self.cached is None else self.cached
        return (
            (prompt_tokens - cached_tokens) * round(self.prompt * NANO_PER_TOKEN)
            + cached_tokens * round(cached * NANO_PER_TOKEN)
            + completion_tokens * round(self.completion * NANO_PER_TOKEN)
        )


FREE = Price()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """by_model: of `base:adapter`, of `base` for every adapter on it that has none of its own, or of `*`"""

    by_model: Mapping[str, Price] = field(default_factory=dict)

    def of(self, base: str, adapter: str | None = None) -> Price:
        if adapter is not None and f"{base}:{adapter}" in self.by_model:
            return self.by_model[f"{base}:{adapter}"]
        return self.by_model.get(base) or self.by_model.get("*", FREE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowUsage:
    """What a replica computed for one flow since it started. All but the name can be added up.

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
        """Return the sum of both, under this one's name."""
        numbers = (each.name for each in fields(self) if each.name != "flow")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in numbers})


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
        """Return the same report with the first `most` flows by name and all others as one."""
        if len(self.flows) <= most:
            return self
        named = {usage.flow: usage for usage in self.flows[:most] if usage.flow != REST}
        rest = FlowUsage(flow=REST)
        for usage in self.flows:
            if usage.flow not in named:
                rest = rest.plus(usage)
        return replace(self, flows=(*named.values(), rest))


def report_in(answer: Mapping[str, object]) -> tuple[dict[str, str], list[dict[str, object]]]:
    """Return what the admin service answers of usage: the columns of every line with their types, and the lines."""
    columns, data = answer["columns"], answer["data"]
    assert isinstance(columns, dict)
    assert isinstance(data, list)
    return columns, data


def csv_of(answer: Mapping[str, object]) -> str:
    """Return this answer as CSV with a line of names (RFC 4180), even if empty. Values that look like formulas become
    text.
    """
    columns, data = report_in(answer)
    written = io.StringIO()
    writer = csv.DictWriter(written, list(columns))
    writer.writeheader()
    writer.writerows({name: _harmless(value) for name, value in each.items()} for each in data)
    return written.getvalue()


def _harmless(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value
