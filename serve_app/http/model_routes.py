"""Routes about models and the service: tokens, properties, adapters, explanations, health."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api.limits import WireLimits
from serve_app.api.listings import explanation_body, tokenizer_body
from serve_app.api.native import adapters_body, props_body
from serve_app.api.parse import CHAT, COMPLETION, Body, read_json_object, read_request
from serve_app.api.paths import Path
from serve_app.api.tokenize import detokenized, parse_apply_template, parse_detokenize, parse_tokenize
from serve_app.core.cards import ModelCard
from serve_app.core.errors import ServeError, Unauthenticated, Unavailable
from serve_app.core.ledger import CLIENT_LEFT
from serve_app.core.tenants import Amount
from serve_app.http.exchange import ClientGone, body_of, dialect_asked, rate_headers, route
from serve_app.http.guard import Identify, anybody
from serve_app.router.inquiries import Explainer, Inquiries
from serve_app.router.router import Router

Endpoint = Callable[[Request], Awaitable[Response]]
NO_REPLICA = "No model has a replica that answers."


def model_routes(router: Router, inquiries: Inquiries, *, limits: WireLimits, max_body_bytes: int) -> list[Route]:
    """Return the routes about models. `model` is optional if one model is served; GETs take it from the query."""

    async def tokenize(request: Request) -> Response:
        call = parse_tokenize(await body_of(request, max_bytes=max_body_bytes), limits)
        card = await router.once_awake(lambda: inquiries.card(call.model))
        found = await inquiries.tokenize(call.model, call.request_to(card))
        return JSONResponse(call.answer(found, max_model_len=card.max_model_len))

    async def apply_template(request: Request) -> Response:
        call = parse_apply_template(await body_of(request, max_bytes=max_body_bytes), limits)
        card = await router.once_awake(lambda: inquiries.card(call.model))
        found = await inquiries.tokenize(call.model, call.request_to(card))
        return JSONResponse({"prompt": found.text})

    async def detokenize(request: Request) -> Response:
        model, token_ids = parse_detokenize(await body_of(request, max_bytes=max_body_bytes), limits)
        await router.once_awake(lambda: inquiries.card(model))
        return JSONResponse(detokenized(await inquiries.detokenize(model, token_ids)))

    def told(body: Callable[[ModelCard], object]) -> Endpoint:
        async def answer(request: Request) -> Response:
            return JSONResponse(body(inquiries.card(request.query_params.get("model"))))

        return answer

    return [
        route(Path.TOKENIZE, counted(tokenize, router)),
        route(Path.DETOKENIZE, counted(detokenize, router)),
        route(Path.APPLY_TEMPLATE, counted(apply_template, router)),
        route(Path.TOKENIZER_INFO, told(tokenizer_body)),
        route(Path.PROPS, told(props_body)),
        route(Path.ADAPTERS, told(adapters_body)),
    ]


async def answer_nobody(request: Request, error: Exception) -> Response:
    """Answer a request whose client left while its body was read; the response reaches nobody."""
    assert isinstance(error, ClientGone)
    return Response(status_code=CLIENT_LEFT)


def counted(endpoint: Endpoint, router: Router) -> Endpoint:
    """Return the endpoint, counted among the tenant's requests per minute and in flight; a failure counts for none.

    Raises as `Quotas.reserve`.
    """

    async def answer(request: Request) -> Response:
        try:
            permit = await router.reserve_one()
        except ServeError:
            request.scope["state"]["beside"] = rate_headers(router.rates)
            raise
        spent = Amount()
        try:
            response = await endpoint(request)
            spent = Amount(requests=1)
        finally:
            if permit is not None:
                permit.settle(spent)
        response.raw_headers.extend(rate_headers(router.rates))
        return response

    return answer


def explain_route(router: Router, inquiries: Inquiries, *, limits: WireLimits, max_body_bytes: int) -> Route:
    """Return the route that explains a body of completions, or of chats where it has `messages`."""
    explainer = Explainer(router, inquiries)

    async def explain(request: Request) -> Response:
        members = read_json_object(await body_of(request, max_bytes=max_body_bytes), max_depth=limits.max_depth)
        spoken = await router.once_awake(lambda: router.dialect_of(members.get("model")))
        dialect = dialect_asked(request.headers) or spoken
        kind: Body[Any] = COMPLETION if members.get("messages") is None else CHAT
        asked = read_request(kind, members, limits, dialect=dialect)
        parts = await explainer.explain(asked)
        return JSONResponse(
            explanation_body(
                asked, members, kind.table, parts, limits={meter.value: each for meter, each in router.rates.items()}
            )
        )

    return route(Path.EXPLAIN, counted(explain, router))


LOADING_RETRY_S = 1


def service_routes(router: Router, limits: WireLimits, identify: Identify = anybody) -> list[Route]:
    """Return the routes that stay open while the service is full, as none of them waits for a replica."""

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [asdict(entry) for entry in router.models()]})

    async def dialects(request: Request) -> Response:
        return JSONResponse(router.dialects(limits))

    async def model(request: Request) -> Response:
        return JSONResponse(asdict(router.model(request.path_params["id"])))

    async def health(request: Request) -> Response:
        if router.fleet.is_ready:
            return JSONResponse({"status": "ok"})
        has_only_failed = router.fleet.failed and not router.fleet.loading
        body = {"status": "failed" if has_only_failed else "loading", "models": router.view.loading}
        failed = {"failed": router.view.failed} if router.view.failed else {}
        return JSONResponse(body | failed, 503, {"retry-after": str(LOADING_RETRY_S)})

    async def ready(request: Request) -> Response:
        reason = NO_REPLICA if not router.fleet.can_serve else None
        try:
            identify(None)
        except Unavailable as error:
            reason = error.message
        except Unauthenticated:
            pass  # keys are known
        if reason is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unready", "reason": reason}, 503, {"retry-after": str(LOADING_RETRY_S)})

    return [
        route(Path.MODELS, models),
        route(Path.MODEL, model),
        route(Path.DIALECTS, dialects),
        route(Path.HEALTH, health),
        route(Path.V1_HEALTH, health),
        route(Path.READY, ready),
    ]
