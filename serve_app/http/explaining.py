"""The route that says what a request would do."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api.dialects import HEADER, Dialect, dialect_named
from serve_app.api.explanation import explanation_body
from serve_app.api.json_body import read_json_object
from serve_app.api.limits import WireLimits
from serve_app.api.parse import CHAT, COMPLETION, read_request
from serve_app.api.paths import Path
from serve_app.http.bodies import body_of
from serve_app.http.counted import counted
from serve_app.http.routes import route
from serve_app.router.inquiries import Explainer, Inquiries
from serve_app.router.router import Router


def explain_route(router: Router, inquiries: Inquiries, *, limits: WireLimits, max_body_bytes: int) -> Route:
    """A body of completions, or one of chats where it has `messages`, read as that route would read it."""
    explainer = Explainer(router, inquiries)

    async def explain(request: Request) -> Response:
        members = read_json_object(await body_of(request, max_bytes=max_body_bytes), max_depth=limits.max_depth)
        asked = request.headers.get(HEADER)
        dialect: Dialect = router.dialect_of(members.get("model")) if asked is None else dialect_named(asked)
        if members.get("messages") is not None:
            chat = read_request(CHAT, members, limits, dialect=dialect)
            body = explanation_body(chat, members, CHAT.table, await explainer.explain(chat), limits=explainer.limits)
        else:
            plain = read_request(COMPLETION, members, limits, dialect=dialect)
            parts = await explainer.explain(plain)
            body = explanation_body(plain, members, COMPLETION.table, parts, limits=explainer.limits)
        return JSONResponse(body)

    return route(Path.EXPLAIN, counted(explain, router))
