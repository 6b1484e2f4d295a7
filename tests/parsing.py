"""From the bytes of a body to the request that it makes, as the routes do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import UNION, Dialect
from serve_app.api.limits import DEFAULT_LIMITS, WireLimits
from serve_app.api.parse import COMPLETION, Body, read_json_object, read_request

Request = TypeVar("Request", bound=CompletionRequest)
ChooseDialect = Callable[[object], Dialect]


def parse_completion(
    body: bytes, limits: WireLimits = DEFAULT_LIMITS, *, choose_dialect: ChooseDialect = lambda model: UNION
) -> CompletionRequest:
    return parse_request(COMPLETION, body, limits, choose_dialect)


def parse_request(kind: Body[Request], body: bytes, limits: WireLimits, choose_dialect: ChooseDialect) -> Request:
    members = read_json_object(body, max_depth=limits.max_depth)
    return read_request(kind, members, limits, dialect=choose_dialect(members.get("model")))
