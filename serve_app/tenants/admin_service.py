"""Every request of an administrator as a name and its arguments, answered with what JSON can hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict

from sqlalchemy.exc import SQLAlchemyError

from serve_app.core.batches import FILES_DAYS
from serve_app.core.tenants import Scope, Tenant
from serve_app.tenants.batch_store import BatchStore
from serve_app.tenants.batch_work import BatchWork
from serve_app.tenants.declaration import changed, names_twice, tenant_from, told_of
from serve_app.tenants.errors import NotThere, TenancyError, unavailable
from serve_app.tenants.keys import Key, digest_of, new_key, new_key_id
from serve_app.tenants.ledger import LedgerStore, columns_of, question_of, report_of
from serve_app.tenants.store import Author, TenantStore

DAY_S = 86_400.0
DEFAULT_OVERLAP_S = DAY_S
MAX_SECONDS = 36_525 * DAY_S
"""A century, which every calendar can add to today."""
MAX_EVENT = 2**63 - 1
MOST_EVENTS = 1000
"""Of one answer; what was asked for after the last of them is the next one."""
KNOWN_SCOPES = frozenset(map(str, Scope))
ADMINISTRATORS = "administrators"
"""The tenant of the first key of an administrator; it may use no model."""

Arguments = Mapping[str, object]
Answer = dict[str, object]


class AdminService:
    """The one place where administration begins: what HTTP and the command line ask for is spelled alike.

    pepper: under which digests are made. Raises TenancyError where the store's keys were made under another.
    """

    def __init__(self, store: TenantStore, pepper: bytes, *, files_days: int = FILES_DAYS) -> None:
        store.use_pepper(pepper)
        self._store = store
        self._pepper = pepper
        self.ledger = LedgerStore(store.engine)
        self.batches = BatchStore(store.engine, files_days=files_days)
        self._batch_work = BatchWork(self.ledger, clock=time.monotonic, wall=time.time, files_days=files_days)
        self._services: Mapping[str, Callable[[Arguments, Author], Answer]] = {
            "list_tenants": self._list_tenants,
            "show_tenant": self._show_tenant,
            "add_tenant": self._add_tenant,
            "set_tenant": self._set_tenant,
            "remove_tenant": self._remove_tenant,
            "apply_tenants": self._apply_tenants,
            "list_keys": self._list_keys,
            "create_key": self._create_key,
            "create_admin_key": self._create_admin_key,
            "rotate_key": self._rotate_key,
            "revoke_key": self._revoke_key,
            "list_events": self._list_events,
            "show_usage": self._show_usage,
            **self.batches.services,
        }

    def answer(self, service: str, arguments: Arguments, by: Author) -> Answer:
        """Raises TenancyError; NotThere where what is named is not there, StoreUnavailable where the database fails."""
        try:
            return self._services[service](arguments, by)
        except SQLAlchemyError as error:
            raise unavailable(error) from error

    def of_batches(self, method: str, *arguments: object) -> object:
        """Return what `BatchWork` answers, or `BatchStore.add_file`; for one caller at a time. Raises as `answer`."""
        owner = self.batches if method == "add_file" else self._batch_work
        try:
            return getattr(owner, method)(*arguments)
        except SQLAlchemyError as error:
            raise unavailable(error) from error

    def _list_tenants(self, arguments: Arguments, by: Author) -> Answer:
        return _list_of([told_of(tenant) for tenant in self._store.tenants()])

    def _show_tenant(self, arguments: Arguments, by: Author) -> Answer:
        return told_of(self._store.tenant(str(arguments["name"])))

    def _add_tenant(self, arguments: Arguments, by: Author) -> Answer:
        tenant = tenant_from(arguments)
        self._store.change_tenants(by, added=[tenant])
        return told_of(tenant)

    def _set_tenant(self, arguments: Arguments, by: Author) -> Answer:
        name = str(arguments["name"])
        return told_of(self._store.change_tenant(name, lambda tenant: changed(tenant, arguments), by))

    def _remove_tenant(self, arguments: Arguments, by: Author) -> Answer:
        name = str(arguments["name"])
        if name == ADMINISTRATORS:
            raise TenancyError(f"{name!r} stays: without its keys nobody administers; revoke those that are to end.")
        self._store.change_tenants(by, removed=[name])
        return {"removed": name}

    def _apply_tenants(self, arguments: Arguments, by: Author) -> Answer:
        _check_names(arguments, "tenants", "dry_run")
        is_dry = arguments.get("dry_run", False)
        if not isinstance(is_dry, bool):
            raise TenancyError(f"dry_run must be true or false; found {str(is_dry)[:96]!r}.")
        wanted = _tenants_in(arguments.get("tenants"))
        version = self._store.version  # first: what changes meanwhile is not applied to
        there = {tenant.name: tenant for tenant in self._store.tenants()}
        added = [each for each in wanted if each.name not in there]
        other = [each for each in wanted if there.get(each.name, each) != each]
        removed = sorted(there.keys() - {each.name for each in wanted} - {ADMINISTRATORS})
        if not is_dry:
            self._store.change_tenants(by, added=added, changed=other, removed=removed, version=version)
        return {
            "added": [told_of(tenant) for tenant in added],
            "changed": {each.name: _changes(there[each.name], each) for each in other},
            "removed": removed,
        }

    def _list_keys(self, arguments: Arguments, by: Author) -> Answer:
        tenant = arguments.get("tenant")
        keys = self._store.keys(None if tenant is None else self._store.tenant(str(tenant)).name)
        return _list_of([{**told_of_key(key), "is_valid": key.is_valid(by.at)} for key in keys])

    def _create_key(self, arguments: Arguments, by: Author) -> Answer:
        _check_names(arguments, "tenant", "scopes", "lifetime_s")
        if not isinstance(arguments.get("tenant"), str):
            raise TenancyError("tenant must be the name of one.")
        scopes = _scopes(arguments.get("scopes"))
        lifetime_s = _seconds("lifetime_s", arguments.get("lifetime_s"))
        return self._created(str(arguments["tenant"]), scopes, lifetime_s, by)

    def _create_admin_key(self, arguments: Arguments, by: Author) -> Answer:
        """One that may administer and read metrics, and complete nothing; of a tenant that is made where it is not."""
        _check_names(arguments, "lifetime_s")
        lifetime_s = _seconds("lifetime_s", arguments.get("lifetime_s"))
        try:
            self._store.tenant(ADMINISTRATORS)
        except NotThere:
            self._store.change_tenants(by, added=[tenant_from({"name": ADMINISTRATORS, "models": []})])
        return self._created(ADMINISTRATORS, frozenset({Scope.ADMIN, Scope.METRICS}), lifetime_s, by)

    def _rotate_key(self, arguments: Arguments, by: Author) -> Answer:
        """A new key with the rights of an old one, which is good for a while more."""
        _check_names(arguments, "id", "overlap_s")
        overlap_s = _seconds("overlap_s", arguments.get("overlap_s"))
        overlap_s = DEFAULT_OVERLAP_S if overlap_s is None else overlap_s
        if overlap_s < 0:
            raise TenancyError(f"overlap_s must be at least 0; found {overlap_s:g}.")
        key_id, secret = str(arguments["id"]), new_key()

        def successor(old: Key) -> Key:
            if not old.is_valid(by.at):
                raise TenancyError(f"The key {key_id!r} has expired or was revoked; create another.")
            lifetime_s = None if old.expires_at is None else old.expires_at - old.created_at
            return self._made(old.tenant, secret, by, old.scopes, lifetime_s)

        return _shown_once(self._store.replace_key(key_id, successor, by.at + overlap_s, by), secret)

    def _revoke_key(self, arguments: Arguments, by: Author) -> Answer:
        self._store.end_key(str(arguments["id"]), by.at, by)
        return told_of_key(self._store.key(str(arguments["id"])))

    def _list_events(self, arguments: Arguments, by: Author) -> Answer:
        after = arguments.get("after") or 0
        if not isinstance(after, int) or not 0 <= after <= MAX_EVENT:
            raise TenancyError("after must be the number of an event.")
        found = self._store.events(after=after, most=MOST_EVENTS + 1)
        return _list_of([asdict(each) for each in found[:MOST_EVENTS]]) | {"has_more": len(found) > MOST_EVENTS}

    def _show_usage(self, arguments: Arguments, by: Author) -> Answer:
        question = question_of(arguments)
        return _list_of(report_of(self.ledger.usage(question))) | {"columns": columns_of(question)}

    def _created(self, tenant: str, scopes: frozenset[Scope], lifetime_s: float | None, by: Author) -> Answer:
        if not scopes:
            raise TenancyError(f"A key needs at least one scope of {', '.join(Scope)}.")
        if lifetime_s is not None and lifetime_s <= 0:
            raise TenancyError(f"A key's time to live must be more than 0 s; found {lifetime_s:g}.")
        secret = new_key()
        key = self._made(tenant, secret, by, scopes, lifetime_s)
        self._store.add_key(key, by)
        return _shown_once(key, secret)

    def _made(self, tenant: str, secret: str, by: Author, scopes: frozenset[Scope], lifetime_s: float | None) -> Key:
        return Key(
            id=new_key_id(),
            tenant=tenant,
            digest=digest_of(secret, self._pepper),
            scopes=scopes,
            created_at=by.at,
            expires_at=None if lifetime_s is None else by.at + lifetime_s,
        )


def _list_of(found: list[dict[str, object]]) -> Answer:
    return {"object": "list", "data": found}


def _shown_once(key: Key, secret: str) -> Answer:
    return {**told_of_key(key), "key": secret}


def _tenants_in(declared: object) -> list[Tenant]:
    if not isinstance(declared, list):
        raise TenancyError("tenants must be a list.")
    wanted = [tenant_from(each) for each in declared]
    if twice := names_twice(each.name for each in wanted):
        raise TenancyError(f"tenants are there twice: {', '.join(twice)}.")
    return wanted


def _check_names(arguments: Arguments, *known: str) -> None:
    for name in arguments:
        if name not in known:
            raise TenancyError(f"{name[:96]!r} is not known here; there are {', '.join(known)}.")


def _scopes(sent: object) -> frozenset[Scope]:
    if sent is None:
        return frozenset({Scope.INFER})
    if not isinstance(sent, list) or not all(each in KNOWN_SCOPES for each in map(str, sent)):
        raise TenancyError(f"scopes must be a list of {', '.join(Scope)}; found {str(sent)[:96]}.")
    return frozenset(map(Scope, map(str, sent)))


def _seconds(name: str, sent: object) -> float | None:
    if sent is None:
        return None
    if not isinstance(sent, int | float) or isinstance(sent, bool):
        raise TenancyError(f"{name} must be a number of seconds; found {str(sent)[:96]!r}.")
    if not -MAX_SECONDS <= sent <= MAX_SECONDS:
        raise TenancyError(f"{name} must be at most {MAX_SECONDS:g} s, which is a century.")
    return float(sent)


def told_of_key(key: Key) -> dict[str, object]:
    """What an administrator is shown of a key: nothing that it could be found by."""
    told = asdict(key) | {"scopes": sorted(key.scopes)}
    del told["digest"]
    return told


def _changes(old: Tenant, new: Tenant) -> dict[str, list[object]]:
    """Of each field that is other: what it is, and what it becomes."""
    before, after = told_of(old), told_of(new)
    return {name: [before[name], after[name]] for name in after if before[name] != after[name]}
