"""Errors as responses, in the dialect that the client asked for."""

from __future__ import annotations

import logging
from typing import NoReturn

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from serve_app.api.dialects import HEADER, Dialect, dialect_named, error_body, error_status
from serve_app.api.error_text import shown
from serve_app.core.errors import EngineFailed, InvalidRequest, MethodNotAllowed, NotFound, ServeError
from serve_app.core.log_context import about
from serve_app.http.exchange import headers_of

logger = logging.getLogger(__name__)


def dialect_heard(scope: Scope, default: Dialect) -> Dialect:
    """The dialect that the request's header names; the default where there is none of that name."""
    name = Headers(scope=scope).get(HEADER)
    try:
        return default if name is None else dialect_named(name)
    except InvalidRequest:
        return default


def error_response(error: ServeError, dialect: Dialect) -> Response:
    response = JSONResponse(error_body(error, dialect), error_status(error, dialect))
    response.raw_headers.extend(headers_of(error))
    response.headers[HEADER.lower()] = dialect.name
    return response


async def raise_as_ours(request: Request, error: Exception) -> NoReturn:
    """Starlette's own refusals, which are of routes and methods. Raises ServeError."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        raise NotFound(f"There is no route {shown(path)}.") from None
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        raise MethodNotAllowed(
            f"{path} must be called with {allowed}; found {request.method}.", None, {"allow": allowed}
        ) from None
    raise error


def as_serve_error(error: Exception, request_id: str) -> ServeError:
    """The error itself, or for one that nobody foresaw a plain failure; its details go to the log alone."""
    if isinstance(error, ServeError):
        return error
    logger.error("request %s failed", request_id, exc_info=error, extra=about([request_id]))
    return EngineFailed("The server failed to answer the request.")
