"""What an administrator does with tenants and keys, over HTTP and on the command line alike."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field

from serve_app.core.tenants import Scope, Tenant
from serve_app.tenants.declaration import changed, names_twice, tenant_from, told_of
from serve_app.tenants.errors import NotThere, TenancyError
from serve_app.tenants.keys import Key, digest_of, new_key, new_key_id
from serve_app.tenants.records import Author
from serve_app.tenants.store import TenantStore

DEFAULT_SCOPES = frozenset({Scope.INFER})
ADMINISTRATORS = "administrators"
"""The tenant of the first key of an administrator; it may use no model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """secret: what the tenant sends; it is shown this once and kept nowhere"""

    key: Key
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What makes the tenants of a store those of a file.

    changes: of each tenant that is there and other: field, what it is, what it becomes
    version: of the store that it was found in
    """

    added: tuple[Tenant, ...]
    changed: tuple[Tenant, ...]
    removed: tuple[str, ...]
    changes: Mapping[str, Mapping[str, tuple[object, object]]]
    version: int


class Administration:
    """pepper: under which digests are made. Raises TenancyError where the store's keys were made under another."""

    def __init__(self, store: TenantStore, pepper: bytes) -> None:
        store.use_pepper(pepper)
        self._store = store
        self._pepper = pepper

    def create_key(
        self, tenant: str, by: Author, *, scopes: Collection[Scope] = DEFAULT_SCOPES, lifetime_s: float | None = None
    ) -> NewKey:
        """Raises TenancyError where there is no such tenant, no scope, or no time to live."""
        if not scopes:
            raise TenancyError(f"A key needs at least one scope of {', '.join(Scope)}.")
        if lifetime_s is not None and not 0 < lifetime_s < math.inf:
            raise TenancyError(f"A key's time to live must be more than 0 s; found {lifetime_s:g}.")
        secret = new_key()
        key = self._made(tenant, secret, by, frozenset(scopes), lifetime_s)
        self._store.add_key(key, by)
        return NewKey(key=key, secret=secret)

    def create_admin_key(self, by: Author, *, lifetime_s: float | None = None) -> NewKey:
        """One that may administer and read metrics, and complete nothing; of a tenant that is made where it is not."""
        try:
            self._store.tenant(ADMINISTRATORS)
        except NotThere:
            self._store.add_tenant(tenant_from({"name": ADMINISTRATORS, "models": []}), by)
        return self.create_key(ADMINISTRATORS, by, scopes={Scope.ADMIN, Scope.METRICS}, lifetime_s=lifetime_s)

    def revoke_key(self, key_id: str, by: Author) -> None:
        """It is good for nothing from now on. Raises TenancyError where there is none."""
        self._store.end_key(key_id, by.at, by)

    def rotate_key(self, key_id: str, by: Author, *, overlap_s: float) -> NewKey:
        """A new key with the rights of an old one, which is good for `overlap_s` more.

        Raises TenancyError where the old one is none, or is good for nothing any more.
        """
        if not 0 <= overlap_s < math.inf:
            raise TenancyError(f"overlap_s must be at least 0; found {overlap_s:g}.")
        secret = new_key()

        def successor(old: Key) -> Key:
            if not old.is_valid(by.at):
                raise TenancyError(f"The key {key_id!r} has expired or was revoked; create another.")
            lifetime_s = None if old.expires_at is None else old.expires_at - old.created_at
            return self._made(old.tenant, secret, by, old.scopes, lifetime_s)

        return NewKey(key=self._store.replace_key(key_id, successor, by.at + overlap_s, by), secret=secret)

    def change_tenant(self, name: str, changes: object, by: Author) -> Tenant:
        """Raises TenancyError."""
        return self._store.change_tenant(name, lambda tenant: changed(tenant, changes), by)

    def remove_tenant(self, name: str, by: Author) -> None:
        """With all of its keys. Raises TenancyError, also for that of the administrators."""
        if name == ADMINISTRATORS:
            raise TenancyError(f"{name!r} stays: without its keys nobody administers; revoke those that are to end.")
        self._store.remove_tenant(name, by)

    def difference(self, declared: object) -> Difference:
        """What `apply` would do. declared: all tenants there are to be. Raises TenancyError."""
        if not isinstance(declared, list):
            raise TenancyError("tenants must be a list.")
        wanted = [tenant_from(each) for each in declared]
        if twice := names_twice(each.name for each in wanted):
            raise TenancyError(f"tenants are there twice: {', '.join(twice)}.")
        version = self._store.version  # first: what changes meanwhile is not applied to
        there = {tenant.name: tenant for tenant in self._store.tenants()}
        new = {tenant.name for tenant in wanted} - there.keys()
        other = tuple(each for each in wanted if each.name not in new and each != there[each.name])
        return Difference(
            added=tuple(each for each in wanted if each.name in new),
            changed=other,
            removed=tuple(sorted(there.keys() - {each.name for each in wanted} - {ADMINISTRATORS})),
            changes={each.name: _changes(there[each.name], each) for each in other},
            version=version,
        )

    def apply(self, difference: Difference, by: Author) -> None:
        """All of it, each with an event of its own, or nothing. Raises TenancyError where the store has changed since
        the difference was found.
        """
        self._store.change_tenants(
            by,
            added=difference.added,
            changed=difference.changed,
            removed=difference.removed,
            version=difference.version,
        )

    def _made(self, tenant: str, secret: str, by: Author, scopes: frozenset[Scope], lifetime_s: float | None) -> Key:
        return Key(
            id=new_key_id(),
            tenant=tenant,
            digest=digest_of(secret, self._pepper),
            scopes=scopes,
            created_at=by.at,
            expires_at=None if lifetime_s is None else by.at + lifetime_s,
        )


def told_of_key(key: Key) -> dict[str, object]:
    """What an administrator is shown of a key: nothing that it could be found by."""
    told = asdict(key) | {"scopes": sorted(key.scopes)}
    del told["digest"]
    return told


def _changes(old: Tenant, new: Tenant) -> dict[str, tuple[object, object]]:
    before, after = told_of(old), told_of(new)
    return {name: (before[name], after[name]) for name in after if before[name] != after[name]}
