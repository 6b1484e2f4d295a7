"""All tenants and keys at one moment, and whose key was presented."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping

from serve_app.core.errors import Unauthenticated
from serve_app.core.tenants import NOBODY, Identity, Tenant
from serve_app.tenants.keys import KEY, Key, digest_of

NO_DIGEST = "0" * 64
UNKNOWN: tuple[Key | None, Identity] = (None, NOBODY)


class Directory:
    """Unchanging; another one takes its place when something was changed.

    pepper:  under which digests were made
    version: grows with every change of what is kept
    origins: pages of these may call with some tenant's key
    """

    def __init__(self, tenants: Iterable[Tenant], keys: Iterable[Key], *, pepper: bytes, version: int = 0) -> None:
        self.version = version
        self.tenants = {tenant.name: tenant for tenant in tenants}
        self._keys = {key.digest: (key, _bearer(key, self.tenants)) for key in keys if key.tenant in self.tenants}
        self._by_id = {key.id: key for key, _ in self._keys.values()}
        self._pepper = pepper
        self.origins = frozenset(origin for tenant in self.tenants.values() for origin in tenant.cors_origins)

    def identify(self, presented: str | None, now: float) -> Identity:
        """Whose key it is. What is said does not tell a key that never was from one that no longer is.

        now: Unix seconds
        Raises Unauthenticated.
        """
        if not presented:
            raise Unauthenticated("This service asks for a key: send it as `Authorization: Bearer sa-…`.")
        is_key = KEY.fullmatch(presented) is not None
        digest = digest_of(presented if is_key else "", self._pepper)
        key, bearer = self._keys.get(digest, UNKNOWN)
        is_same = hmac.compare_digest(digest, NO_DIGEST if key is None else key.digest)
        if key is None or not is_same or not key.is_valid(now):
            raise Unauthenticated("The key that was sent is unknown, has expired or was revoked.")
        return bearer

    def is_good(self, key_id: str, now: float) -> bool:
        """Return whether the key of this id still opens the door. now: Unix seconds"""
        key = self._by_id.get(key_id)
        return key is not None and key.is_valid(now)


def _bearer(key: Key, tenants: Mapping[str, Tenant]) -> Identity:
    return Identity(tenant=tenants[key.tenant], key_id=key.id, scopes=key.scopes)
