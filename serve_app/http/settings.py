"""What the HTTP application allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from serve_app.api.limits import DEFAULT_LIMITS, WireLimits
from serve_app.core.bounded import Amount, PositiveFloat, PositiveInt
from serve_app.core.tenants import Tenant
from serve_app.router.story import Story

Trace = Callable[[Story, int, str, Iterable[tuple[bytes, bytes]]], str | None]
"""Told of a completion when it is over: story, status, route and headers; gives the id of its trace, if it has one."""


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """What a client may send, and how long the service waits for it; the part that operators set.

    max_body_bytes: bytes of a request's body; the service refuses more while it reads
    keep_alive_s:   a stream gets a comment line after so long without an event, so that nothing closes it as idle
    max_stall_s:    the service gives up a client that reads nothing for so long, and its place is free
    resume_s:       for so long after it ended, or lost its client, a stream can be fetched anew; 0 is never
    cors_origins:   web pages of these origins may call, `https://app.example.org` or `*` for any; none by default
    max_file_bytes:  bytes of one file that is sent to /v1/files
    max_files_bytes: bytes of all files of a tenant, beyond which it sends no more
    limits:         bounds on one request
    """

    max_body_bytes: PositiveInt = 16 * 1024 * 1024
    keep_alive_s: PositiveFloat = 15.0
    max_stall_s: PositiveFloat = 60.0
    resume_s: Amount = 60.0
    cors_origins: tuple[str, ...] = ()
    max_file_bytes: PositiveInt = 200 << 20
    max_files_bytes: PositiveInt = 2 << 30
    limits: WireLimits = DEFAULT_LIMITS


@dataclass(frozen=True, kw_only=True)
class HttpSettings(ClientSettings):
    """What the HTTP application allows.

    farewell_s:       how long a client that is given up has to read why
    sends_request_id: whether `x-request-id` is put on responses; False if the server in front does so
    trace:            who makes traces; None is nobody
    """

    farewell_s: float = 5.0
    sends_request_id: bool = True
    trace: Trace | None = None

    def for_tenant(self, tenant: Tenant) -> HttpSettings:
        """Return the same settings with the tenant's own bounds."""
        if tenant.max_n is None:
            return self
        return replace(self, limits=replace(self.limits, max_n=min(tenant.max_n, self.limits.max_n)))
