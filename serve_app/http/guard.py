"""Asks every request for its key, and hands it to the routes as its tenant sees them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from serve_app.api.error_text import shown
from serve_app.api.paths import OPEN, WATCHING, AdminPath, Path, path_of
from serve_app.core.errors import Forbidden, NotFound, Unauthenticated, Unavailable
from serve_app.core.machine import is_loopback
from serve_app.core.tenants import LOCAL, NOBODY, Identity, Tenant

Identify = Callable[[str | None], Identity]
"""Returns whose key a request came with, if any. Raises Unauthenticated."""
LookAgain = Callable[[str], Awaitable[None]]
"""Waits until a key that was made elsewhere a moment ago is known here."""
Administer = Callable[[str, Mapping[str, object], str], Awaitable[Mapping[str, object]]]
"""Carries out a command of administration: its name, its arguments, the id of the key that asks. Raises ServeError."""

ASK_FOR_KEYS = (
    "`store: sqlite:///serve_app.db` in the args of the router's application, no `auth: none` in its user_config, and"
    " `serve_app keys create`"
)
"""What an operator sets so that the service asks for keys."""
MAX_TENANTS = 256
"""The routes of so many tenants, those that asked last, are kept ready."""


def anybody(key: str | None) -> Identity:
    """Return the identity of every client where no keys are asked for: it may do everything."""
    return LOCAL


async def heard_all(key: str) -> None:
    """Return at once, where every key is known as soon as it is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Decides who is let in.

    look_again: awaited before a key that nobody knows, or that cannot be judged, is refused
    origins:    pages of these may call with some tenant's key
    administer: who answers administrators; None where nothing is administered
    shows_queues: whether whoever comes without a key gets the part of /metrics that gateways read
    closed:     why everything but `/health` is refused, whatever key is presented; None where it is not
    """

    identify: Identify = anybody
    look_again: LookAgain = heard_all
    origins: Callable[[], frozenset[str]] = frozenset
    administer: Administer | None = None
    shows_queues: bool = False
    closed: str | None = None

    @property
    def is_open(self) -> bool:
        """Return whether nobody is asked for a key."""
        return self.identify is anybody and self.closed is None


OPEN_DOOR = Door()


def door_without_keys(host: str | None) -> Door:
    """Return the open door where only this machine reaches the host (None is no HTTP at all), else a closed one."""
    if host is None or is_loopback(host):
        return OPEN_DOOR
    return Door(
        closed=f"This service listens on {host}, which other machines reach, and asks nobody for a key; so it answers"
        " nothing but /health. Its operator binds 127.0.0.1 (`http_options.host`), or has it ask for keys:"
        f" {ASK_FOR_KEYS}."
    )


class Guard:
    """The one way to the routes. What needs no key is answered as nobody would see it, and no websocket is opened.

    routes_for: the routes of a tenant; asked again when many others came since
    check:      raises once the router is stopped; then it answers nobody but those who watch it
    """

    def __init__(self, door: Door, routes_for: Callable[[Tenant], ASGIApp], check: Callable[[], None]) -> None:
        self._check = check
        self._door = door
        self._routes_for = routes_for
        self._routes: OrderedDict[Tenant, ASGIApp] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await WebSocketClose()(scope, receive, send)
            return
        key = presented_key(scope["headers"])
        self._check_path(scope)
        try:
            identity = self._admit(scope, key)
        except (Unauthenticated, Unavailable):  # the latter where the router stood still for so long
            if key is None:
                raise
            await self._door.look_again(key)
            identity = self._admit(scope, key)
        scope["state"] |= {"identity": identity, "admit_again": partial(self._admit, scope, key)}
        await self._of(identity.tenant)(scope, receive, send)

    def _admit(self, scope: Scope, key: str | None) -> Identity:
        """Return who asks, or raise why this request is not let in.

        Raises Unavailable once the router is stopped, Unauthenticated, Forbidden for a key of another scope, and
        NotFound for an unknown path, because no scope is known for it.
        """
        path = self._check_path(scope)
        if self._door.closed is not None and path is not Path.HEALTH:
            raise Unauthenticated(self._door.closed)
        if path in OPEN or (path is Path.METRICS and key is None and self._door.shows_queues):
            return LOCAL if self._door.is_open else NOBODY
        identity = LOCAL if self._door.is_open else self._door.identify(key)
        if path is None:
            raise NotFound(f"There is no route {shown(scope['path'])}.")
        if path.scope is not None and path.scope not in identity.scopes:
            raise Forbidden(f'This key is not for "{path.scope}"; it is for {", ".join(sorted(identity.scopes))}.')
        return identity

    def _check_path(self, scope: Scope) -> Path | AdminPath | None:
        """Return the path that is asked for. Raises Unavailable once the router is stopped."""
        path = path_of(scope["path"])
        if path not in WATCHING:
            self._check()
        return path

    def _of(self, tenant: Tenant) -> ASGIApp:
        routes = self._routes.pop(tenant, None) or self._routes_for(tenant)
        self._routes[tenant] = routes
        if len(self._routes) > MAX_TENANTS:
            self._routes.popitem(last=False)
        return routes


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the key of `Authorization: Bearer …` or `X-Api-Key`; None where there is neither."""
    other = None
    for name, value in headers:
        if name == b"authorization":
            kind, _, key = value.decode("latin-1").partition(" ")
            if kind.lower() == "bearer" and key.strip():
                return key.strip()
        elif name == b"x-api-key":
            other = value.decode("latin-1")
    return other or None
