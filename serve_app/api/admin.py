"""What administrators may ask for: each route and method with its service, its body and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from serve_app.api.forms.schema import (
    BOOLEAN,
    COUNT,
    INTEGER,
    NUMBER,
    OBJECT,
    POSITIVE,
    STRING,
    Schema,
    array,
    mapping,
    nullable,
    record,
    reference,
)
from serve_app.api.paths import AdminPath
from serve_app.core.ledger import DIMENSIONS
from serve_app.core.shares import Priority
from serve_app.core.tenants import LEAST_BUDGET, LEAST_WEIGHT, MOST_BUDGET, MOST_WEIGHT, Scope

COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "choices")
AMOUNT: Schema = {"type": "number", "exclusiveMinimum": 0}
BUDGET: Schema = {"type": "number", "minimum": LEAST_BUDGET, "maximum": MOST_BUDGET}
SCOPES = array({"enum": list(Scope)})


@dataclass(frozen=True, slots=True)
class Service:
    """name: as the admin service knows it; answer, body: names of schemas; query: what may stand behind `?`"""

    name: str
    summary: str
    answer: str
    body: str | None = None
    query: tuple[str, ...] = ()


OWN = ("by", "since", "until", "format")
EVENTS = ("after",)
_CHANGED = "What was changed, when and by whom"
_ROTATED = "Make a key in the place of another, which stays valid for a while"
SERVICES: Mapping[tuple[AdminPath, str], Service] = MappingProxyType(
    {
        (AdminPath.TENANTS, "GET"): Service("list_tenants", "List the tenants", "TenantList"),
        (AdminPath.TENANTS, "POST"): Service("add_tenant", "Add a tenant", "Tenant", "NewTenant"),
        (AdminPath.TENANTS, "PUT"): Service("apply_tenants", "Let these be all tenants", "Difference", "AllTenants"),
        (AdminPath.TENANT, "GET"): Service("show_tenant", "One tenant", "Tenant"),
        (AdminPath.TENANT, "PATCH"): Service("set_tenant", "Change fields of a tenant", "Tenant", "TenantChange"),
        (AdminPath.TENANT, "DELETE"): Service("remove_tenant", "Remove a tenant with its keys", "Removed"),
        (AdminPath.KEYS, "GET"): Service("list_keys", "List keys without their secrets", "KeyList", query=("tenant",)),
        (AdminPath.KEYS, "POST"): Service("create_key", "Make a key, which is shown this once", "ShownKey", "NewKey"),
        (AdminPath.KEY, "DELETE"): Service("revoke_key", "Revoke a key", "Key"),
        (AdminPath.ROTATION, "POST"): Service("rotate_key", _ROTATED, "ShownKey", "Rotation"),
        (AdminPath.EVENTS, "GET"): Service("list_events", _CHANGED, "EventList", query=EVENTS),
        (AdminPath.USAGE, "GET"): Service("show_usage", "Who used what", "UsageList", query=("tenant", *OWN)),
        (AdminPath.OWN_USAGE, "GET"): Service("show_usage", "What the key's tenant used", "UsageList", query=OWN),
    }
)  # fmt: skip

LIMITS: Mapping[str, Schema] = MappingProxyType(
    {
        "requests_per_minute": nullable(POSITIVE),
        "tokens_per_minute": nullable(POSITIVE),
        "max_in_flight": nullable(POSITIVE),
        "max_in_flight_tokens": nullable(POSITIVE),
        "budget_per_day": nullable(BUDGET),
        "budget_per_month": nullable(BUDGET),
    }
)
TENANT: Mapping[str, Schema] = MappingProxyType(
    {
        "weight": {"type": "number", "minimum": LEAST_WEIGHT, "maximum": MOST_WEIGHT},
        "priority": {"enum": list(get_args(Priority))},
        "models": array(STRING),
        "limits": record(optional=LIMITS, is_closed=True),
        "max_n": nullable(POSITIVE),
        "max_tokens": nullable(POSITIVE),
        "cors_origins": array(STRING),
        "cache_group": nullable(STRING),
        "log_texts": {"type": "number", "minimum": 0, "maximum": 1},
    }
)
KEY: Mapping[str, Schema] = MappingProxyType(
    {
        "id": STRING,
        "tenant": STRING,
        "scopes": SCOPES,
        "created_at": NUMBER,
        "expires_at": nullable(NUMBER),
        "revoked_at": nullable(NUMBER),
    }
)
EVENT: Mapping[str, Schema] = MappingProxyType(
    {"id": INTEGER, "at": NUMBER, "actor": STRING, "action": STRING, "subject": STRING, "details": OBJECT}
)


def _list_of(name: str, **beside: Schema) -> Schema:
    return record({"object": {"const": "list"}, "data": array(reference(name)), **beside})


ADMIN_SCHEMAS: Mapping[str, Schema] = MappingProxyType(
    {
        "Tenant": record({"name": STRING, **TENANT}),
        "NewTenant": record({"name": STRING}, optional=TENANT, is_closed=True),
        "TenantChange": record({}, optional={"name": STRING, **TENANT}, is_closed=True),
        "AllTenants": record({"tenants": array(reference("NewTenant"))}, optional={"dry_run": BOOLEAN}, is_closed=True),
        "Difference": record({"added": array(reference("Tenant")), "changed": OBJECT, "removed": array(STRING)}),
        "Removed": record({"removed": STRING}),
        "TenantList": _list_of("Tenant"),
        "Key": record(KEY, optional={"is_valid": BOOLEAN}),
        "KeyList": _list_of("Key"),
        "NewKey": record(
            {"tenant": STRING}, optional={"scopes": SCOPES, "lifetime_s": nullable(AMOUNT)}, is_closed=True
        ),
        "Rotation": record({}, optional={"overlap_s": nullable({**COUNT, "type": "number"})}, is_closed=True),
        "ShownKey": record({**KEY, "key": STRING}),
        "Event": record(EVENT),
        "EventList": _list_of("Event", has_more=BOOLEAN),
        "Usage": record(
            {**dict.fromkeys(COUNTS, COUNT), "engine_seconds": NUMBER, "cost": NUMBER},
            optional=dict.fromkeys(DIMENSIONS, STRING),
        ),
        "UsageList": _list_of("Usage", columns=mapping(STRING)),
    }
)
