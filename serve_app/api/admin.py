"""What administrators may ask for: each route and method with its service, its body and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from serve_app.api.forms.form import Schema
from serve_app.api.paths import AdminPath
from serve_app.api.schemas import COUNT, INTEGER, NUMBER, POSITIVE, STRING, array, nullable, record, reference
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
        (AdminPath.ADAPTERS, "GET"): Service("list_adapters", "List adapters with their versions", "AdapterList"),
        (AdminPath.ADAPTERS, "POST"): Service("publish_adapter", "Publish an adapter", "ListedAdapter", "LoadAdapter"),
        (AdminPath.ADAPTERS, "DELETE"): Service(
            "withdraw_adapter", "Serve an adapter no longer", "WithdrawnAdapter", query=("lora_name",)
        ),
        (AdminPath.ROLLBACK, "POST"): Service(
            "roll_back_adapter", "Serve the version before", "ListedAdapter", "UnloadAdapter"
        ),
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
        "publishes": array(STRING),
        "limits": {"type": "object", "properties": dict(LIMITS), "additionalProperties": False},
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
    {"id": INTEGER, "at": NUMBER, "actor": STRING, "action": STRING, "subject": STRING, "details": {"type": "object"}}
)


def _closed(required: Mapping[str, Schema], optional: Mapping[str, Schema]) -> Schema:
    """Return the schema of a body that refuses unknown members."""
    return {**record(required, optional=optional), "additionalProperties": False}


def _list_of(name: str, **beside: Schema) -> Schema:
    return record({"object": {"const": "list"}, "data": array(reference(name)), **beside})


ADMIN_SCHEMAS: Mapping[str, Schema] = MappingProxyType(
    {
        "Tenant": record({"name": STRING, **TENANT}),
        "NewTenant": _closed({"name": STRING}, TENANT),
        "TenantChange": _closed({}, {"name": STRING, **TENANT}),
        "AllTenants": _closed({"tenants": array(reference("NewTenant"))}, {"dry_run": {"type": "boolean"}}),
        "Difference": record(
            {"added": array(reference("Tenant")), "changed": {"type": "object"}, "removed": array(STRING)}
        ),
        "Removed": record({"removed": STRING}),
        "TenantList": _list_of("Tenant"),
        "Key": record(KEY, optional={"is_valid": {"type": "boolean"}}),
        "KeyList": _list_of("Key"),
        "NewKey": _closed({"tenant": STRING}, {"scopes": SCOPES, "lifetime_s": nullable(AMOUNT)}),
        "Rotation": _closed({}, {"overlap_s": nullable({**COUNT, "type": "number"})}),
        "ShownKey": record({**KEY, "key": STRING}),
        "Event": record(EVENT),
        "EventList": _list_of("Event", has_more={"type": "boolean"}),
        "Usage": record(
            {**dict.fromkeys(COUNTS, COUNT), "engine_seconds": NUMBER, "cost": NUMBER},
            optional=dict.fromkeys(DIMENSIONS, STRING),
        ),
        "UsageList": _list_of("Usage", columns={"type": "object", "additionalProperties": STRING}),
    }
)
