"""What an administrator does with tenants and keys."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from serve_app.core.tenants import Scope, Tenant
from serve_app.tenants.errors import TenancyError
from serve_app.tenants.keys import Key, digest_of, new_key, new_key_id
from serve_app.tenants.store import TenantStore

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
PATTERN = re.compile(r"\*|[A-Za-z0-9._*-]{1,96}(:[A-Za-z0-9._*-]{1,96})?")
MAX_PATTERNS = 256
DEFAULT_SCOPES = frozenset({Scope.INFER})


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """secret: what the tenant sends; it is shown this once and kept nowhere"""

    key: Key
    secret: str


class Administration:
    """pepper: under which digests are made"""

    def __init__(self, store: TenantStore, pepper: bytes) -> None:
        self._store = store
        self._pepper = pepper

    def create_key(
        self, tenant: str, now: float, *, scopes: Collection[Scope] = DEFAULT_SCOPES, lifetime_s: float | None = None
    ) -> NewKey:
        """Raises TenancyError where there is no such tenant, no scope, or no time to live."""
        if not scopes:
            raise TenancyError(f"A key needs at least one scope of {', '.join(Scope)}.")
        if lifetime_s is not None and not 0 < lifetime_s < math.inf:
            raise TenancyError(f"A key's time to live must be more than 0 s; found {lifetime_s:g}.")
        secret = new_key()
        key = Key(
            id=new_key_id(),
            tenant=tenant,
            digest=digest_of(secret, self._pepper),
            scopes=frozenset(scopes),
            created_at=now,
            expires_at=None if lifetime_s is None else now + lifetime_s,
        )
        self._store.add_key(key)
        return NewKey(key=key, secret=secret)

    def revoke_key(self, key_id: str, now: float) -> None:
        """It is good for nothing from now on. Raises TenancyError where there is none."""
        self._store.end_key(key_id, now)

    def rotate_key(self, key_id: str, now: float, *, overlap_s: float) -> NewKey:
        """A new key with the rights of an old one, which is good for `overlap_s` more.

        Raises TenancyError where the old one is none, or is good for nothing any more.
        """
        old = self._store.key(key_id)
        if not old.is_valid(now):
            raise TenancyError(f"The key {key_id!r} has expired or was revoked; create another.")
        lifetime_s = None if old.expires_at is None else old.expires_at - old.created_at
        new = self.create_key(old.tenant, now, scopes=old.scopes, lifetime_s=lifetime_s)
        self._store.end_key(key_id, now + overlap_s)
        return new


def check_tenant(tenant: Tenant) -> Tenant:
    """The tenant, if it is one. Raises TenancyError with the name of what is wrong."""
    if not NAME.fullmatch(tenant.name):
        raise TenancyError(f"name must be {NAME.pattern}; found {tenant.name[:96]!r}.")
    if len(tenant.rights.patterns) > MAX_PATTERNS:
        raise TenancyError(f"models must be at most {MAX_PATTERNS} patterns; found {len(tenant.rights.patterns)}.")
    for pattern in tenant.rights.patterns:
        if not PATTERN.fullmatch(pattern):
            raise TenancyError(f"models must be patterns like base, base:adapter, base:*, *; found {pattern[:96]!r}.")
    if tenant.max_n is not None and tenant.max_n < 1:
        raise TenancyError(f"max_n must be at least 1; found {tenant.max_n}.")
    if tenant.cache_group is not None and not NAME.fullmatch(tenant.cache_group):
        raise TenancyError(f"cache_group must be {NAME.pattern}; found {tenant.cache_group[:96]!r}.")
    return tenant
