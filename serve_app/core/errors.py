"""Every error that a client can be shown, as one tree of classes.

Pickle carries errors between processes and rebuilds them from `args`, so `args` hold every fact of an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self


class ServeError(Exception):
    """An error that ends a request and is reported to its client.

    message: a whole sentence that names the parameter, what was found and what is allowed
    param:   the request's parameter at fault, as the client spelled it
    facts:   further numbers for machines (`n_prompt_tokens`, `retry_after_s`, …)
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(
        self, message: str, param: str | None = None, facts: Mapping[str, int | float | str] | None = None
    ) -> None:
        self.message = message
        self.param = param
        self.facts: dict[str, int | float | str] = dict(facts or {})
        super().__init__(message, param, self.facts)

    @classmethod
    def refusing(
        cls,
        param: str,
        *,
        must: str,
        found: str,
        remedy: str = "",
        facts: Mapping[str, int | float | str] | None = None,
    ) -> Self:
        """Return the refusal of a parameter in the one form: its name, what it must be, what was found.

        remedy: a sentence that follows
        """
        message = f'"{param}" must {must}; found {found}.'
        return cls(f"{message} {remedy}" if remedy else message, param, facts)

    def about(self, model: str) -> Self:
        """Return the same error with a message that names this one of several models."""
        return type(self)(f'Model "{model}": {self.message}', self.param, self.facts)

    def __str__(self) -> str:
        return self.message

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which the same request may succeed; None if repeating it is pointless."""
        value = self.facts.get("retry_after_s")
        return float(value) if value is not None else None


class InvalidRequest(ServeError):
    """The request is malformed or a parameter is out of its range."""

    status, type, code = 400, "invalid_request_error", "invalid_value"


class MalformedJson(InvalidRequest):
    """The body cannot be read as JSON at all."""

    code = "malformed_json"


class BodyLost(InvalidRequest):
    """The request announced a body that did not reach the application."""

    code = "body_lost"


class UnsupportedParameter(InvalidRequest):
    """The parameter belongs to some other system, or to none, and this version does not support it."""

    code = "unsupported_parameter"


class ContextOverflow(InvalidRequest):
    """The prompt, or the prompt and its completion, do not fit the model's context."""

    type, code = "exceed_context_size_error", "context_length_exceeded"


class AdapterUnusable(InvalidRequest):
    """The adapter exists but its files were refused; the message says why."""

    code = "adapter_unusable"

    @classmethod
    def because(cls, name: str, reason: str) -> Self:
        return cls(f'Adapter "{name}" cannot be served: {reason.rstrip(".")}.')


class Unauthenticated(ServeError):
    """The request has no key, or an unknown one; the response says how to send one."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(ServeError):
    """The request asks for something that its client may not have."""

    status, type, code = 403, "permission_error", "forbidden"


class NotFound(ServeError):
    """No such route or object."""

    status, type, code = 404, "not_found_error", "not_found"


class ModelNotFound(NotFound):
    """No base model of that name is served."""

    code = "model_not_found"


class AdapterNotFound(NotFound):
    """The base model is served, the adapter is not."""

    code = "adapter_not_found"


class MethodNotAllowed(ServeError):
    """The route exists, the method does not."""

    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class RequestTimeout(ServeError):
    """The client took too long to send its request."""

    status, type, code = 408, "timeout_error", "request_timeout"


class Resumed(ServeError):
    """The client has fetched its stream anew, and reads it there."""

    status, type, code = 409, "conflict_error", "stream_resumed"


class PayloadTooLarge(ServeError):
    """The request's body is larger than the server reads."""

    status, type, code = 413, "invalid_request_error", "payload_too_large"


class UnsupportedMediaType(ServeError):
    """The request's body is not JSON."""

    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class KeyReused(ServeError):
    """Another request came with the same Idempotency-Key."""

    status, type, code = 422, "invalid_request_error", "idempotency_key_reused"


class QuotaExceeded(ServeError):
    """A limit of the tenant has too little left; the request may be repeated after `retry_after_s`."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"


class OutOfBudget(QuotaExceeded):
    """The tenant has spent its budget for the day or the month."""

    code = "insufficient_quota"


class NotSupported(ServeError):
    """The model does not support this."""

    status, type, code = 501, "not_supported_error", "not_supported"


class Unavailable(ServeError):
    """Nothing is wrong with the request; it may be repeated after `retry_after_s`."""

    status, type, code = 503, "unavailable_error", "unavailable"


class ModelLoading(Unavailable):
    """No replica of the model is ready yet."""

    code = "model_loading"


class Overloaded(Unavailable):
    """Every queue that could hold the request is full."""

    code = "overloaded"


class DeadlineExceeded(ServeError):
    """The request took longer than the server's limit."""

    status, type, code = 504, "timeout_error", "deadline_exceeded"


class EngineFailed(ServeError):
    """The engine failed while it computed the request; the request itself may be fine."""

    code = "engine_failed"


class ReplicaLost(EngineFailed):
    """The replica that computed the request went away."""

    code = "replica_lost"


class ReplicaLeaves(ReplicaLost):
    """The replica is to end, and another one can go on with the request."""
