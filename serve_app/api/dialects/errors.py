"""The body and the status of an error, in the shape that a dialect's clients expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from serve_app.api.dialects.dialect import Dialect, ErrorShape
from serve_app.api.dialects.tables import UNION
from serve_app.core.errors import ServeError

FLAT_TYPES: Mapping[int, str] = MappingProxyType(
    {
        400: "BadRequestError",
        401: "AuthenticationError",
        403: "PermissionDeniedError",
        404: "NotFoundError",
        422: "UnprocessableEntityError",
        429: "RateLimitError",
    }
)


def error_status(error: ServeError, dialect: Dialect = UNION) -> int:
    return dialect.status_of(status=error.status, code=error.code)


def error_body(error: ServeError, dialect: Dialect = UNION) -> dict[str, object]:
    """The error as a whole response."""
    return SHAPES[dialect.error_shape](error, error_status(error, dialect))


def error_event_body(error: ServeError, dialect: Dialect = UNION) -> dict[str, object]:
    """The error in a stream, where every dialect wraps it."""
    wrapped = _openai if dialect.error_shape is ErrorShape.OPENAI else _nested
    return wrapped(error, error_status(error, dialect))


def _nested(error: ServeError, status: int) -> dict[str, object]:
    """OpenAI's four keys, a code for machines, and the error's facts."""
    return {
        "error": {
            **error.facts,
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": status,
            "error_code": error.code,
        }
    }


def _openai(error: ServeError, status: int) -> dict[str, object]:
    """OpenAI's own: `code` is the word."""
    body = _nested(error, status)["error"]
    assert isinstance(body, dict)
    return {"error": body | {"code": error.code}}


def _message(error: ServeError, status: int) -> dict[str, object]:
    return {"message": error.message}


def _flat(error: ServeError, status: int) -> dict[str, object]:
    return {
        **error.facts,
        "object": "error",
        "message": error.message,
        "type": FLAT_TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError"),
        "param": error.param,
        "code": status,
        "error_code": error.code,
    }


SHAPES: Mapping[ErrorShape, Callable[[ServeError, int], dict[str, object]]] = MappingProxyType(
    {ErrorShape.NESTED: _nested, ErrorShape.OPENAI: _openai, ErrorShape.MESSAGE: _message, ErrorShape.FLAT: _flat}
)
