"""What the HTTP application allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from serve_app.api.limits import DEFAULT_LIMITS, WireLimits
from serve_app.core.tenants import Tenant
from serve_app.router.story import Story

Trace = Callable[[Story, int, str, Iterable[tuple[bytes, bytes]]], str | None]
"""Told of a completion when it is over: story, status, route and headers; gives the id of its trace, if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Bounds on a request's bytes and on a client's patience, and what is told beside a response.

    max_body_bytes:      of a request's body; more is refused while it is read
    keep_alive_s:        after so long without an event a stream gets a comment line
    max_stall_s, farewell_s: a client that reads nothing for so long is given up, and has so long to read why
    cors_origins:        pages of these origins may read responses; "*" is any, none is none
    sends_request_id:    whether `x-request-id` is put on responses; False where the server before it does so
    trace:               who makes traces; None is nobody
    """

    max_body_bytes: int = 16 * 1024 * 1024
    keep_alive_s: float = 15.0
    max_stall_s: float = 60.0
    farewell_s: float = 5.0
    limits: WireLimits = DEFAULT_LIMITS
    cors_origins: tuple[str, ...] = ()
    sends_request_id: bool = True
    trace: Trace | None = None

    def for_tenant(self, tenant: Tenant) -> HttpSettings:
        """The same with what the tenant is bound to besides."""
        if tenant.max_n is None:
            return self
        return replace(self, limits=replace(self.limits, max_n=min(tenant.max_n, self.limits.max_n)))
