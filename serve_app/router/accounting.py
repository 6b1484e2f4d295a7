"""Accounting of a router: it reserves from tenants' limits, settles what requests came to, and writes their rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy

from serve_app.core.backend import has_images
from serve_app.core.cards import ModelCard
from serve_app.core.delta import Usage
from serve_app.core.errors import DeadlineExceeded
from serve_app.core.ledger import CLIENT_LEFT, Prices, Row
from serve_app.core.names import ModelRef
from serve_app.core.request import GenerationRequest
from serve_app.core.tenants import Amount, Identity, Tenant
from serve_app.router.ledger_writer import LedgerWriter
from serve_app.router.quotas import FREE, Permit, Quotas
from serve_app.router.run import Run
from serve_app.router.stats import RunStats

ENDED_BY_CLIENTS = frozenset({CLIENT_LEFT, DeadlineExceeded.status})
"""Statuses of requests that were given up: clients may say how long they wait."""
ERROR = 400
"""Statuses from here on are of what was not answered."""


class Accounting:
    """Outlives applications, as it knows what is in flight.

    prices: may be exchanged; a request is charged by those of its end
    wall:   seconds since 1970
    """

    def __init__(
        self,
        quotas: Quotas,
        ledger_writer: LedgerWriter,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.prices = Prices()
        self.quotas = quotas
        self.ledger_writer = ledger_writer
        self._wall = wall

    def writing_to(self, writer: LedgerWriter) -> Accounting:
        """Return the same accounting with the prices of now, whose rows go elsewhere."""
        made = copy(self)
        made.ledger_writer = writer
        return made

    async def reserve(self, tenant: Tenant, run: Run, card_of: Callable[[ModelRef], ModelCard]) -> Permit:
        """Raises as `Quotas.reserve`."""
        if not self.quotas.bounds(tenant):
            return FREE
        most, parts = worst_case(run.requests, card_of=card_of, prices=self.prices)
        return await self.quotas.reserve(tenant, most, parts=parts)

    async def reserve_one(self, tenant: Tenant) -> Permit:
        """Of a request that computes no tokens. Raises as `Quotas.reserve`."""
        return await self.quotas.reserve(tenant, Amount(requests=1))

    def close(self, identity: Identity, run: Run, *, request_id: str, status: int, permit: Permit | None) -> None:
        """The request, which replicas took, is over: settle it, and write it down.

        What a prompt came to that nobody told of no row can say: replicas count it, as unattributed. Of the limits it
        uses what was reserved for it, unless the service did not get the request done. So do completions that are
        told of now and then, as they are answered whole, and ended in between: by their own pace, if they had one.
        """
        rows = [
            self._row(identity, run, number, model, stats, request_id=request_id, status=status)
            for number, (model, stats) in enumerate(run.stats_by_model.items())
        ]
        if permit is not None:
            is_failure = status >= ERROR and status not in ENDED_BY_CLIENTS
            permit.settle(self._used(rows, run, None if is_failure else permit))
        self.ledger_writer.write(rows)

    def _used(self, rows: Sequence[Row], run: Run, reserved: Permit | None) -> Amount:
        """Of its tenant's limits, without what another run of the request has used of them.

        reserved: what counts where it is not known what a part came to
        """
        tokens = sum([row.prompt_tokens + row.completion_tokens for row in rows])
        cost = sum([row.cost for row in rows])
        for model, stats in run.stats_by_model.items() if run.is_resumed else ():
            tokens -= stats.past.total_tokens
            cost -= self._cost(model, stats.past)
        for part, prompt, completion in _unknown(run, reserved) if reserved is not None else ():
            model = run.requests[part].model
            price = self.prices.of(model.base, model.adapter)
            tokens += prompt + completion
            cost += price.cost(prompt_tokens=prompt, cached_tokens=0, completion_tokens=completion)
        return Amount(requests=1 if tokens else 0, tokens=tokens, cost=cost)

    def _row(
        self,
        identity: Identity,
        run: Run,
        number: int,
        model: ModelRef,
        stats: RunStats,
        *,
        request_id: str,
        status: int,
    ) -> Row:
        usage, (first_at, last_at), (queue_s, prefill_s) = stats.usage, stats.shown_at, stats.waits
        return Row(
            id=f"{run.response_id}/{number}",
            tenant=identity.tenant.name,
            key_id=identity.key_id,
            request_id=request_id,
            model=model.base,
            adapter=model.adapter or "",
            version=model.version,
            at=self._wall(),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            choices=stats.num_finished,
            queue_s=queue_s,
            prefill_s=prefill_s,
            decode_s=last_at - first_at,
            engine_ns=stats.engine_ns,
            cost=self._cost(model, usage),
            status=status,
        )

    def _cost(self, model: ModelRef, usage: Usage) -> int:
        return self.prices.of(model.base, model.adapter).cost(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        )


def _unknown(run: Run, reserved: Permit) -> Iterator[tuple[int, int, int]]:
    """Parts of which not all was told, with tokens of prompt and of completions that may have been computed besides."""
    if not reserved.parts:
        return
    for part in run.stats.unheard:
        yield part, reserved.parts[part][0], 0
    for part, (request, (_, most)) in enumerate(zip(run.requests, reserved.parts, strict=True)):
        if request.is_read_whole and (untold := run.stats.untold(part, n=request.n, most=most)):
            yield part, 0, untold


TOOL_PROMPT_ROOM = " " * 1000
"""As long as the default text about tools, at least."""
NUM_SPECIAL = 8
"""Tokens that a tokenizer may set before and behind a prompt."""


def worst_case(
    requests: Sequence[GenerationRequest], *, card_of: Callable[[ModelRef], ModelCard], prices: Prices
) -> tuple[Amount, list[tuple[int, int]]]:
    """One request of a client, and of each of its parts the tokens of the prompt and of all completions. No text has
    more tokens than bytes, and none is longer than the model's context. Of a chat that is what was sent, names and
    quotes of its JSON included, and the template; a picture may be any length.
    """
    tokens = cost = 0
    parts = []
    for request in requests:
        card = card_of(request.model)
        context = card.max_model_len
        prompt = context if has_images(request) else min(context, _num_bytes(request, card) + NUM_SPECIAL)
        longest = context if request.stop.max_tokens is None else min(context, request.stop.max_tokens)
        completion = request.n * longest
        tokens += prompt + completion
        parts.append((prompt, completion))
        price = prices.of(request.model.base, request.model.adapter)
        cost += price.cost(prompt_tokens=prompt, cached_tokens=0, completion_tokens=completion)
    return Amount(requests=1, tokens=tokens, cost=cost), parts


def _num_bytes(request: GenerationRequest, card: ModelCard) -> int:
    texts = [*request.texts]
    if request.conversation is not None:
        texts += [request.conversation.source, card.chat_template, card.tool_template, TOOL_PROMPT_ROOM]
    return request.prompt.num_ids + sum(
        [len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")) for text in texts]
    )
