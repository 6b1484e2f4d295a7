"""Routes beside completions that other servers have: tokens, properties, adapters."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api.limits import WireLimits
from serve_app.api.listings import tokenizer_body
from serve_app.api.native import adapters_body, props_body
from serve_app.api.paths import Path
from serve_app.api.tokenize import detokenized, parse_apply_template, parse_detokenize, parse_tokenize
from serve_app.core.ledger import CLIENT_LEFT
from serve_app.http.bodies import body_of
from serve_app.http.counted import counted
from serve_app.http.exchange import ClientGone
from serve_app.http.routes import route
from serve_app.router.inquiries import Inquiries
from serve_app.router.router import Router


def model_routes(router: Router, inquiries: Inquiries, *, limits: WireLimits, max_body_bytes: int) -> list[Route]:
    """`model` is optional in all of them where one model is served; the GETs take it from the query."""

    async def tokenize(request: Request) -> Response:
        call = parse_tokenize(await body_of(request, max_bytes=max_body_bytes), limits)
        card = inquiries.card(call.model)
        found = await inquiries.tokenize(call.model, call.request_to(card))
        return JSONResponse(call.answer(found, max_model_len=card.max_model_len))

    async def apply_template(request: Request) -> Response:
        call = parse_apply_template(await body_of(request, max_bytes=max_body_bytes), limits)
        found = await inquiries.tokenize(call.model, call.request_to(inquiries.card(call.model)))
        return JSONResponse({"prompt": found.text})

    async def detokenize(request: Request) -> Response:
        call = parse_detokenize(await body_of(request, max_bytes=max_body_bytes), limits)
        return JSONResponse(detokenized(await inquiries.detokenize(call.model, call.token_ids)))

    async def props(request: Request) -> Response:
        return JSONResponse(props_body(inquiries.card(request.query_params.get("model"))))

    async def tokenizer_info(request: Request) -> Response:
        return JSONResponse(tokenizer_body(inquiries.card(request.query_params.get("model"))))

    async def adapters(request: Request) -> Response:
        return JSONResponse(adapters_body(inquiries.card(request.query_params.get("model"))))

    return [
        route(Path.TOKENIZE, counted(tokenize, router)),
        route(Path.DETOKENIZE, counted(detokenize, router)),
        route(Path.APPLY_TEMPLATE, counted(apply_template, router)),
        route(Path.TOKENIZER_INFO, tokenizer_info),
        route(Path.PROPS, props),
        route(Path.ADAPTERS, adapters),
    ]


async def answer_nobody(request: Request, error: Exception) -> Response:
    """The client left while its body was read; what is sent here reaches no one."""
    assert isinstance(error, ClientGone)
    return Response(status_code=CLIENT_LEFT)
