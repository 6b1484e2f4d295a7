"""Who used what: a row per request, what replicas counted beside, and what the two come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from serve_app.core.prices import Prices

UNATTRIBUTED = "unattributed"
"""The key id and status of what replicas spent for a tenant and no row explains."""

CLIENT_LEFT = 499
"""The status of what nobody was there to be answered; logged and counted, never sent to anybody."""

OTHER_MIXES = "*"
"""The adapter of a day's sums over mixes of adapters that have no line of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a replica spent for one flow since it began; it only grows.

    prompt_tokens:  of prompts that were told of, cached ones included, or computed and given up
    engine_ns:      of its steps, each shared out among the tokens that it computed
    """

    flow: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    engine_ns: int = 0

    def at_least(self, other: Spent) -> Spent:
        """The later of two."""
        return Spent(
            flow=self.flow,
            prompt_tokens=max(self.prompt_tokens, other.prompt_tokens),
            cached_tokens=max(self.cached_tokens, other.cached_tokens),
            completion_tokens=max(self.completion_tokens, other.completion_tokens),
            engine_ns=max(self.engine_ns, other.engine_ns),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a replica spent for some flows, for a listener that heard what came before.

    until: what to ask for the next time, so that nothing is missed and nothing told twice
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
    """What one request came to with one model.

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


DIMENSIONS = ("tenant", "model", "adapter", "key_id", "day")
"""By which usage is asked for."""
SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "choices", "engine_ns", "cost")
"""What is added up."""


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


class Ledger(Protocol):
    """Where rows are kept; deployments carry these calls over Ray."""

    def charge_by(self, prices: Prices) -> None:
        """Have what no row explains cost what its tokens do by these, from now on."""
        ...

    async def record(self, rows: Sequence[Row], counted: Sequence[Counted]) -> None:
        """Keep the rows, those that are there already left as they are, and what replicas counted by then."""
        ...

    async def usage(self, question: UsageQuestion) -> Sequence[UsageLine]:
        """What was used, in the order of what is asked for by."""
        ...
