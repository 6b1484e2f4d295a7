"""The router: opens runs of clients' requests and answers what can be asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from secrets import token_hex

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import DIALECTS, UNION, Dialect, Suffix
from serve_app.api.limits import DEFAULT_LIMITS, WireLimits
from serve_app.api.listings import ModelEntry, adapter_entry, dialects_body, list_models, mix_entry
from serve_app.api.scoring import ScoreRequest
from serve_app.catalog.aliases import Weights, heaviest_first, in_order, share_of
from serve_app.catalog.resolve import Catalog, Wanted
from serve_app.core.cards import ModelCard
from serve_app.core.errors import ContextOverflow, InvalidRequest, ModelLoading, NotSupported, ServeError
from serve_app.core.ledger import Prices
from serve_app.core.names import ModelRef
from serve_app.core.prompt import SuffixMode
from serve_app.core.request import GenerationRequest, Kept
from serve_app.core.tenants import LOCAL, Rights, Tenant
from serve_app.router.accounting import Accounting
from serve_app.router.admission import Admission, Ticket
from serve_app.router.fleet import ASLEEP, Fleet
from serve_app.router.lower import Resolve, lower, model_param, new_response_id
from serve_app.router.message import Writing, writing_of
from serve_app.router.quotas import Permit, Rates
from serve_app.router.resuming import Found
from serve_app.router.rollouts import Rollouts
from serve_app.router.run import Run, RunSettings
from serve_app.router.shadow import Shadows
from serve_app.router.waking import Answer, Waker

MAX_ASKED = 64
"""Of a list of models that was not checked yet, so many are asked for their dialect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The settings of a router.

    dialect: of requests that name none, to models that have none of their own
    accepts_any_model: in the dialect llama.cpp the only model answers to any name, as there
    """

    run: RunSettings = field(default_factory=RunSettings)
    dialect: Dialect = UNION
    accepts_any_model: bool = True


class Router:
    """One request after another onto a fleet.

    admission: what lets them in; one that outlives the router goes on counting when that is exchanged
    accounting: where limits are kept and requests written down; None is nowhere
    waker:     what wakes models that were scaled to zero; None wakes none
    rollouts:  what compares canaries with the versions beside them; None compares none
    shadows:   what computes requests besides, unseen
    """

    def __init__(
        self,
        fleet: Fleet,
        config: RouterConfig | None = None,
        *,
        admission: Admission | None = None,
        accounting: Accounting | None = None,
        waker: Waker | None = None,
        rollouts: Rollouts | None = None,
        shadows: Shadows | None = None,
    ) -> None:
        self._waker = waker or Waker(fleet)
        self.accounting = accounting
        self.rollouts = rollouts
        self.fleet = fleet
        self._see_as(LOCAL.tenant)
        self.admission = admission or Admission(lambda: fleet.rooms)
        self._config = config or RouterConfig()
        self.shadows = shadows or Shadows(fleet, self.admission)

    def enter(self) -> Ticket:
        """A place for one of the tenant's requests. Raises as `Admission.enter`."""
        return self.admission.enter(self._share)

    async def once_awake(
        self, attempt: Callable[[], Answer], ticket: Ticket | None = None, *, limit_s: float | None = None
    ) -> Answer:
        """Return what the attempt returns; it is repeated once each sleeping model that it names is ready.

        limit_s: seconds that the client gives it, where that is less than `max_wait_s`
        Raises as the attempt, and ModelLoading where a model is not ready in time.
        """
        longest = self.admission.settings.max_wait_s
        return await self._waker.once_awake(attempt, ticket, max_wait_s=min(longest, limit_s or longest))

    def open(
        self,
        request: CompletionRequest,
        ticket: Ticket | None = None,
        *,
        request_id: str = "",
        limit_s: float | None = None,
        kept: Kept | None = None,
    ) -> Run:
        """A run of a settled request, not started; enter it to start.

        request_id: what the client and the logs call it
        limit_s: seconds that the client gives it, where that is less than it has anyway
        kept: what replicas keep beside it, without its ids, so that its client can fetch it anew; None keeps nothing
        ticket: of the request, where it had to pass admission; grows to what the request needs, and can end the run

        Raises ServeError where the model cannot be resolved, a token id is out of its vocabulary, or there is no room.
        """
        response_id = new_response_id(request.id_prefix)
        requests = self.lowered(request, response_id, client_request_id=request_id)
        if self.rollouts is not None and self.rollouts.wants(requests):
            requests = tuple(replace(each, reports_prompt_ids=True) for each in requests)
        if kept is not None:
            models = tuple(each.model for each in requests)
            kept = replace(kept, id=request.own_id(response_id), response_id=response_id, models=models)
            requests = tuple(replace(each, kept=kept) for each in requests)
        return self._run(requests, response_id, ticket, limit_s=limit_s)

    def resume(
        self,
        found: Found,
        request: CompletionRequest,
        ticket: Ticket | None = None,
        *,
        seen: Mapping[int, int],
        limit_s: float | None = None,
    ) -> Run:
        """A run that tells a stream again and goes on with it, not started. Prompts that were lost are computed anew.

        request: as it was settled;  seen: tokens that the client has, by choice
        Raises ServeError where a model cannot be had any more in the version that began, or there is no room.
        """
        parts = found.completed(() if found.is_whole else self._lowered_again(found, request), seen)
        run = self._run([past.request for past in parts], found.kept.response_id, ticket, limit_s=limit_s)
        run.go_on(parts)
        for model in run.unended:
            try:
                self.fleet.links_for(model)
            except ModelLoading:
                self.view.resolve(model.pinned)  # raises where waiting is of no use
        return run

    def _run(
        self,
        requests: Sequence[GenerationRequest],
        response_id: str,
        ticket: Ticket | None,
        *,
        limit_s: float | None,
    ) -> Run:
        settings = self._config.run
        run = Run(
            requests,
            response_id,
            fleet=self.fleet,
            settings=settings if limit_s is None else replace(settings, timeout_s=min(settings.timeout_s, limit_s)),
            resolve=self.view.resolve,
        )
        if ticket is not None:
            sizes: Counter[str] = Counter()
            for each in requests:
                sizes[each.model.base] += each.n
            ticket.grow(sizes)
            ticket.ends_by(run.end)
        return run

    def _lowered_again(self, found: Found, request: CompletionRequest) -> tuple[GenerationRequest, ...]:
        kept = found.kept
        models = [self.view.resolve(each.pinned) for each in kept.models]
        name = found.first.request.client_request_id
        return self.lowered(request, kept.response_id, client_request_id=name, models=models)

    def lowered(
        self,
        request: CompletionRequest,
        response_id: str,
        *,
        client_request_id: str = "",
        models: Sequence[ModelRef] = (),
    ) -> tuple[GenerationRequest, ...]:
        """What a settled request asks of which model, within the tenant's bounds. Raises as `open`.

        models: of its parts, in order; () are those that it names
        """
        return lower(
            request,
            response_id,
            resolve=self._resolver(request, client_request_id),
            card_of=self._card_of,
            client_request_id=client_request_id,
            models=models,
            tenant=self._tenant,
        )

    def shadow(self, request: CompletionRequest, run: Run, *, request_id: str) -> None:
        """Begin what the alias of a settled request wants computed besides, now that replicas took the request."""
        name = request.model.strip()
        alias = None if request.listed else self.view.aliases.get(name)
        for address, percent in () if alias is None else alias.shadow.items():
            if 100 * share_of("shadow", name, address, run.response_id) < percent:
                lowered = partial(self._lowered_for, request.model_copy(update={"model": address}), request_id)
                self.shadows.begin(address, lowered, request_id=request_id, settings=self._config.run)

    def _lowered_for(
        self, request: CompletionRequest, client_request_id: str, response_id: str
    ) -> tuple[GenerationRequest, ...]:
        """What a request asks of a model that the operator chose, which the tenant need not be allowed to use."""
        everything = self.seen_by(replace(self._tenant, rights=Rights()))
        return everything.lowered(request, response_id, client_request_id=client_request_id)

    def seen_by(self, tenant: Tenant) -> Router:
        """The same as it is for this tenant: who asks decides what there is to be asked for."""
        made = copy(self)
        made._see_as(tenant)
        return made

    def _see_as(self, tenant: Tenant) -> None:
        self._tenant, self._share, self.view = tenant, tenant.share, self.fleet.seen_with(tenant.rights)

    def check_lengths(self, run: Run) -> None:
        """Refuse what a replica would refuse by its length, before it is carried there. Raises ContextOverflow."""
        for each in run.requests:
            card = self.view.cards.get(each.model.base)
            if card is None or card.prompt_length is None:
                continue
            try:
                card.prompt_length.check(each)  # a conversation has no text yet: of that the replica says it
            except ContextOverflow as error:
                raise run.told([each.model], error) from None

    async def reserve(self, run: Run) -> Permit | None:
        """What a run that was opened may come to, of its tenant's limits. Raises as `Quotas.reserve`."""
        return None if self.accounting is None else await self.accounting.reserve(self._tenant, run, self._card_of)

    async def reserve_one(self) -> Permit | None:
        """For a request that computes no tokens. Raises as `Quotas.reserve`."""
        return None if self.accounting is None else await self.accounting.reserve_one(self._tenant)

    @property
    def prices(self) -> Prices:
        """What tokens cost; where nothing is written down, nothing."""
        return Prices() if self.accounting is None else self.accounting.prices

    @property
    def rates(self) -> Rates:
        """How the tenant's limits per minute stand."""
        return {} if self.accounting is None else self.accounting.quotas.rates(self._tenant)

    def writings_of(self, run: Run) -> tuple[Writing, ...]:
        """How the model of each part of a run writes."""
        return tuple(writing_of(self.view.cards.get(request.model.base)) for request in run.requests)

    def settled(self, request: CompletionRequest, *, request_id: str = "") -> CompletionRequest:
        """The request with what follows from its models alone, of several what all can do. Raises as `open`."""
        if isinstance(request, ScoreRequest):
            card = self._card_of(self._resolver(request, request_id)(Wanted(model=request.model)))
            return request.apart() if card.records.head is None else request
        has_tools, has_suffix = bool(request.tools_in_prompt), bool(request.suffix) or request.gap is not None
        if not (has_tools or has_suffix or request.unread_by("")):
            return request
        resolve = self._resolver(request, request_id)
        wanted = [Wanted(model=name, param=model_param(request, at)) for at, name in enumerate(request.models)]
        cards = [self._card_of(resolve(each)) for each in wanted]
        if has_tools and any(card.tool_prompt == "prompt" for card in cards):
            request = request.model_copy(update={"has_default_tool_prompt": True})
        if has_tools and any(card.tool_prompt == "ignore" for card in cards):
            request = request.model_copy(update={"ignored_parameters": (*request.ignored_parameters, "tools")})
        templates = [card.template_for(has_tools=has_tools) for card in cards]
        if unread := set.intersection(*(set(request.unread_by(template)) for template in templates)):
            told = (*request.ignored_parameters, *sorted(unread))
            request = request.model_copy(update={"ignored_parameters": told})
        if not has_suffix:
            return request
        return with_suffix_mode(request, next((card for card in cards if not card.fills_gaps), cards[0]))

    @property
    def dialect(self) -> Dialect:
        """Of requests whose model is not known."""
        return self._config.dialect

    def dialect_of(self, model: object) -> Dialect:
        """Of requests to this model that name none; `model` is what was sent, whatever it is.

        Of a list, and of an alias with weights, the dialect of its models, where they agree. Raises ModelLoading for a
        model that sleeps.
        """
        if isinstance(model, list):
            spoken = {self.dialect_of(each).name for each in model[:MAX_ASKED] if isinstance(each, str)}
            return DIALECTS[spoken.pop()] if len(spoken) == 1 else self.dialect
        if not isinstance(model, str):
            return self.dialect
        alias = self.view.aliases.get(model)
        if (
            alias is not None
            and alias.is_weighted
            and (ready := [each for each in alias.targets if self._is_ready(each)])
        ):
            return self.dialect_of(ready)
        try:
            name = self._card_of(self.view.resolve(model)).dialect
            return self.dialect if name is None else DIALECTS[name]
        except ServeError as error:
            if ASLEEP in error.facts:
                raise
        return self.dialect

    def dialects(self, limits: WireLimits = DEFAULT_LIMITS) -> dict[str, object]:
        """Every dialect with what it makes of each parameter within these limits, and who speaks which."""
        of_models = {card.name: card.dialect for card in self.view.cards.values() if card.dialect is not None}
        return dialects_body(default=self.dialect, of_models=of_models, cards=self.view.cards.values(), limits=limits)

    def models(self) -> list[ModelEntry]:
        """Every name that can be sent as `model` now."""
        catalog = self.view.listed
        listed = list_models(catalog.models.values(), _alias_targets(catalog))
        return [entry for entry in listed if entry.id not in catalog.models or entry.id in catalog.bases]

    def model(self, name: str) -> ModelEntry:
        """The entry of one name, also of a form of address that is not listed. Raises as `Fleet.resolve`."""
        entries = {entry.id: entry for entry in self.models()}
        if name in entries:
            return entries[name]
        found = self.view.resolve(name)
        card = self._card_of(found)
        if found.mix or found.adapter is None:
            return mix_entry(card, found) if found.mix else entries[found.name]
        adapter = next(each for each in card.versions(found.adapter) if each.version == found.version)
        return adapter_entry(card, adapter, is_pinned=adapter != card.adapter(found.adapter))

    def _resolver(self, request: CompletionRequest, request_id: str) -> Resolve:
        """Return what finds models for this request: of an alias with weights the same for all of its parts.

        The tenant's `user` gets the same target and version again; a request that names none is drawn for by itself.
        """
        tenant = self._tenant.own
        words = (tenant, "user", request.user) if request.user else (tenant, "request", request_id)
        alone = "" if words[-1] else token_hex(8)

        def ordered(alias: str, weights: Weights) -> list[str]:
            return in_order(weights, alias, *words) if words[-1] else heaviest_first(alias, weights)

        def drawn(address: str) -> float:
            return share_of("canary", address, *words, alone)

        takes_any = self._config.accepts_any_model and request.dialect.takes_any_model
        return partial(self.view.resolve, takes_any=takes_any, order=ordered, draw=drawn)

    def _is_ready(self, name: str) -> bool:
        try:
            self.view.resolve(name)
        except ServeError:
            return False
        return True

    def _card_of(self, ref: ModelRef) -> ModelCard:
        return self.view.cards[ref.base]


def _alias_targets(catalog: Catalog) -> dict[str, dict[ModelRef, float]]:
    """What each alias that leads anywhere means now, with weights, the target that answers questions first."""
    targets: dict[str, dict[ModelRef, float]] = {}
    for name, alias in catalog.aliases.items():
        for target in alias.targets:
            with suppress(ServeError):
                ref = catalog.resolve(target)
                found = targets.setdefault(name, {})
                found[ref] = found.get(ref, 0.0) + alias.weights[target]
    return targets


LACKS = "has no tokens for prefix, suffix and middle"


def with_suffix_mode(request: CompletionRequest, card: ModelCard) -> CompletionRequest:
    """The request with `suffix_mode` as it is carried out with this model; as it was where it has no suffix.

    Raises InvalidRequest where the model is asked for what it cannot do, NotSupported where nothing else was asked for.
    """
    if request.gap is not None:
        if not card.fills_gaps:
            raise NotSupported(f"{card.name} fills no gaps: its tokenizer {LACKS}.", "model")
        return request.model_copy(update={"suffix_mode": SuffixMode.FIM})
    if not request.suffix:
        return request
    if request.suffix_mode is SuffixMode.FIM and not card.fills_gaps:
        must = f'be "append" or absent with {card.name}, whose tokenizer {LACKS}'
        raise InvalidRequest.refusing("suffix_mode", must=must, found='"fim"')
    return request.model_copy(update={"suffix_mode": request.suffix_mode or _usual(request, card)})


def _usual(request: CompletionRequest, card: ModelCard) -> SuffixMode:
    is_infill = card.fills_gaps and request.dialect.suffix is Suffix.INFILL
    return SuffixMode.FIM if is_infill else SuffixMode.APPEND
