"""Every request of an administrator as a name and its arguments, answered with what JSON can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

from sqlalchemy.exc import SQLAlchemyError

from serve_app.core.tenants import Scope
from serve_app.tenants.administration import DEFAULT_SCOPES, Administration, NewKey, told_of_key
from serve_app.tenants.declaration import tenant_from, told_of
from serve_app.tenants.errors import TenancyError, unavailable
from serve_app.tenants.ledger import LedgerStore
from serve_app.tenants.records import Author
from serve_app.tenants.reports import columns_of, question_of, report_of
from serve_app.tenants.store import TenantStore

DAY_S = 86_400.0
DEFAULT_OVERLAP_S = DAY_S
MAX_SECONDS = 36_525 * DAY_S
"""A century, which every calendar can add to today."""
MAX_EVENT = 2**63 - 1
MOST_EVENTS = 1000
"""Of one answer; what was asked for after the last of them is the next one."""
KNOWN_SCOPES = frozenset(map(str, Scope))

Arguments = Mapping[str, object]
Answer = dict[str, object]


class Office:
    """The one place where administration begins: what HTTP and the command line ask for is spelled alike."""

    def __init__(self, store: TenantStore, pepper: bytes) -> None:
        self._store = store
        self._administration = Administration(store, pepper)
        self.ledger = LedgerStore(store.engine)
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
        }

    def answer(self, service: str, arguments: Arguments, by: Author) -> Answer:
        """Raises TenancyError; NotThere where what is named is not there, StoreUnavailable where the database fails."""
        try:
            return self._services[service](arguments, by)
        except SQLAlchemyError as error:
            raise unavailable(error) from error

    def _list_tenants(self, arguments: Arguments, by: Author) -> Answer:
        return _list_of([told_of(tenant) for tenant in self._store.tenants()])

    def _show_tenant(self, arguments: Arguments, by: Author) -> Answer:
        return told_of(self._store.tenant(str(arguments["name"])))

    def _add_tenant(self, arguments: Arguments, by: Author) -> Answer:
        tenant = tenant_from(arguments)
        self._store.add_tenant(tenant, by)
        return told_of(tenant)

    def _set_tenant(self, arguments: Arguments, by: Author) -> Answer:
        return told_of(self._administration.change_tenant(str(arguments["name"]), arguments, by))

    def _remove_tenant(self, arguments: Arguments, by: Author) -> Answer:
        self._administration.remove_tenant(str(arguments["name"]), by)
        return {"removed": arguments["name"]}

    def _apply_tenants(self, arguments: Arguments, by: Author) -> Answer:
        _check_names(arguments, "tenants", "dry_run")
        is_dry = arguments.get("dry_run", False)
        if not isinstance(is_dry, bool):
            raise TenancyError(f"dry_run must be true or false; found {str(is_dry)[:96]!r}.")
        found = self._administration.difference(arguments.get("tenants"))
        if not is_dry:
            self._administration.apply(found, by)
        return {
            "added": [told_of(tenant) for tenant in found.added],
            "changed": {name: {field: list(pair) for field, pair in of.items()} for name, of in found.changes.items()},
            "removed": list(found.removed),
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
        return _shown_once(
            self._administration.create_key(str(arguments["tenant"]), by, scopes=scopes, lifetime_s=lifetime_s)
        )

    def _create_admin_key(self, arguments: Arguments, by: Author) -> Answer:
        _check_names(arguments, "lifetime_s")
        lifetime_s = _seconds("lifetime_s", arguments.get("lifetime_s"))
        return _shown_once(self._administration.create_admin_key(by, lifetime_s=lifetime_s))

    def _rotate_key(self, arguments: Arguments, by: Author) -> Answer:
        _check_names(arguments, "id", "overlap_s")
        overlap_s = _seconds("overlap_s", arguments.get("overlap_s"))
        overlap_s = DEFAULT_OVERLAP_S if overlap_s is None else overlap_s
        return _shown_once(self._administration.rotate_key(str(arguments["id"]), by, overlap_s=overlap_s))

    def _revoke_key(self, arguments: Arguments, by: Author) -> Answer:
        self._administration.revoke_key(str(arguments["id"]), by)
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


def _list_of(found: list[dict[str, object]]) -> Answer:
    return {"object": "list", "data": found}


def _shown_once(made: NewKey) -> Answer:
    return {**told_of_key(made.key), "key": made.secret}


def _check_names(arguments: Arguments, *known: str) -> None:
    for name in arguments:
        if name not in known:
            raise TenancyError(f"{name[:96]!r} is not known here; there are {', '.join(known)}.")


def _scopes(sent: object) -> frozenset[Scope]:
    if sent is None:
        return DEFAULT_SCOPES
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
