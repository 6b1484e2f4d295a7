"""Whose a request is, as far as a proxy can tell: what a router said of its key, or else where it comes from."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus

from starlette.types import Message

from serve_app.http.guard import presented_key
from serve_app.http.slots import TENANT

MAX_KEYS = 4096
"""Of those that came last. The tenant of another is learned with its next request."""

Headers = Iterable[tuple[bytes, bytes]]


class Flows:
    """The tenants of keys, as routers tell with their responses. Keys are known here by a hash alone.

    Law: a key that no router has let in is nobody's. Whoever makes keys up has one flow for all of them, as they come
    from one address.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[int, str] = OrderedDict()
        self._weights: dict[str, float] = {}

    @property
    def has_tenants(self) -> bool:
        """Whether any key was let in: where none are asked for, all are one."""
        return bool(self._tenants)

    def of(self, headers: Headers, address: str) -> str:
        """address: of the connection"""
        key = _key_of(headers)
        tenant = None if key is None else self._tenants.get(key)
        return f"from {_network_of(address)}" if tenant is None else f"of {tenant}"

    def weight_of(self, flow: str) -> float:
        """Of its share beside the others'."""
        return self._weights.get(flow, 1.0)

    def note(self, headers: Headers, start: Message) -> None:
        """How the response to a request with these begins: a router says whose key it is, or that it is nobody's.

        What Serve says by itself tells nothing of it, as of a request whose client has gone.
        """
        if TENANT in start:
            self.learn(headers, *start[TENANT])
        elif start["status"] == HTTPStatus.UNAUTHORIZED:
            self.learn(headers, None)

    def learn(self, headers: Headers, tenant: str | None, weight: float = 1.0) -> None:
        """Whose key the request came with, and that one's weight. None: it was not let in"""
        key = _key_of(headers)
        if key is None:
            return
        self._tenants.pop(key, None)
        if tenant is not None:
            self._tenants[key] = tenant
            self._weights[f"of {tenant}"] = weight
            if len(self._tenants) > MAX_KEYS:
                self._tenants.popitem(last=False)
            if len(self._weights) > MAX_KEYS:
                del self._weights[next(iter(self._weights))]


def _key_of(headers: Headers) -> int | None:
    """A number that differs from process to process; None where there is no key."""
    presented = presented_key(headers)
    return None if presented is None else hash(presented)


@lru_cache(MAX_KEYS)
def _network_of(address: str) -> str:
    """Who has one address of IPv6 has as many as it likes, all of the same first four groups."""
    if ":" not in address:
        return address
    try:
        whole = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    return str(whole.ipv4_mapped or ipaddress.IPv6Address(int(whole) >> 64 << 64))
