"""Tells the server before the application how many sequences the replicas compute at once, and whose a request was."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.core.tenants import Identity
from serve_app.router.fleet import Fleet

SLOTS = "serve_app.slots"
"""A key of the message with which a response begins. It reaches a proxy, and is not sent to any client."""
TENANT = "serve_app.tenant"
"""Another one: name and weight of the tenant whose key was let in; not there where none was, or none is asked for."""


class TellsSlots:
    """ASGI middleware whose responses say so."""

    def __init__(self, app: ASGIApp, *, fleet: Fleet) -> None:
        self._app = app
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                message[SLOTS] = sum(room.num_slots for room in self._fleet.rooms.values())
                identity: Identity | None = scope.get("state", {}).get("identity")
                if identity is not None and identity.key_id:
                    message[TENANT] = identity.tenant.name, identity.tenant.weight
            await send(message)

        await self._app(scope, receive, telling)
