"""Reads a request's JSON body at the wall: the right media type, no more bytes than are allowed."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.requests import Request

from serve_app.api.error_text import shown
from serve_app.core.errors import UnsupportedMediaType
from serve_app.http.exchange import read_body

JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json", re.IGNORECASE)


def check_media_type(headers: Headers) -> None:
    """Raises UnsupportedMediaType; a missing type is taken for JSON."""
    media_type = headers.get("content-type", "").partition(";")[0].strip()
    if media_type and not JSON_TYPE.fullmatch(media_type):
        raise UnsupportedMediaType.refusing("Content-Type", must="be application/json", found=shown(media_type))


async def body_of(request: Request, *, max_bytes: int) -> bytes:
    """Raises ServeError, and ClientGone."""
    check_media_type(request.headers)
    return await read_body(request.receive, content_length=request.headers.get("content-length"), max_bytes=max_bytes)
