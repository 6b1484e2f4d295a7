"""The body and the status of an error, in the shape that a dialect's clients expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from serve_app.api.dialects.dialect import Dialect, ErrorShape
from serve_app.api.dialects.tables import UNION
from serve_app.core.errors import ServeError

CLASSES: Mapping[int, str] = MappingProxyType(
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
    is_wrapped = dialect.error_shape in (ErrorShape.OPENAI, ErrorShape.VLLM)
    shape = SHAPES[dialect.error_shape] if is_wrapped else _nested
    return shape(error, error_status(error, dialect))


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


def _vllm(error: ServeError, status: int) -> dict[str, object]:
    """vLLM's own: `type` is the name of a class, as in SGLang."""
    body = _nested(error, status)["error"]
    assert isinstance(body, dict)
    return {"error": body | {"type": _class_of(status)}}


def _message(error: ServeError, status: int) -> dict[str, object]:
    return {"message": error.message}


def _flat(error: ServeError, status: int) -> dict[str, object]:
    return {
        **error.facts,
        "object": "error",
        "message": error.message,
        "type": _class_of(status),
        "param": error.param,
        "code": status,
        "error_code": error.code,
    }


def _class_of(status: int) -> str:
    return CLASSES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")


SHAPES: Mapping[ErrorShape, Callable[[ServeError, int], dict[str, object]]] = MappingProxyType(
    {
        ErrorShape.NESTED: _nested,
        ErrorShape.OPENAI: _openai,
        ErrorShape.MESSAGE: _message,
        ErrorShape.VLLM: _vllm,
        ErrorShape.FLAT: _flat,
    }
)
