"""What administrators may ask for: each route and method with its service, its body and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from serve_app.api.forms.form import Schema
from serve_app.api.paths import AdminPath
from serve_app.api.schemas import COUNT, INTEGER, NUMBER, STRING, array, nullable, record, reference
from serve_app.core.ledger import DIMENSIONS
from serve_app.core.shares import Priority
from serve_app.core.tenants import LEAST_BUDGET, LEAST_WEIGHT, MOST_BUDGET, MOST_WEIGHT, Scope

POSITIVE: Schema = {"type": "integer", "minimum": 1}
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "choices")
AMOUNT: Schema = {"type": "number", "exclusiveMinimum": 0}
BUDGET: Schema = {"type": "number", "minimum": LEAST_BUDGET, "maximum": MOST_BUDGET}
SCOPES = array({"enum": list(Scope)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """name: as the admin service knows it; body, answer: names of schemas; query: what may stand behind `?`"""

    name: str
    summary: str
    answer: str
    body: str | None = None
    query: tuple[str, ...] = ()


SERVICES: Mapping[tuple[AdminPath, str], Service] = MappingProxyType(
    {
        (AdminPath.TENANTS, "GET"): Service(name="list_tenants", summary="List the tenants", answer="TenantList"),
        (AdminPath.TENANTS, "POST"): Service(
            name="add_tenant", summary="Add a tenant", answer="Tenant", body="NewTenant"
        ),
        (AdminPath.TENANTS, "PUT"): Service(
            name="apply_tenants", summary="Let these be all tenants", answer="Difference", body="AllTenants"
        ),
        (AdminPath.TENANT, "GET"): Service(name="show_tenant", summary="One tenant", answer="Tenant"),
        (AdminPath.TENANT, "PATCH"): Service(
            name="set_tenant", summary="Change fields of a tenant", answer="Tenant", body="TenantChange"
        ),
        (AdminPath.TENANT, "DELETE"): Service(
            name="remove_tenant", summary="Remove a tenant with its keys", answer="Removed"
        ),
        (AdminPath.KEYS, "GET"): Service(
            name="list_keys", summary="List keys, none of which can be read", answer="KeyList", query=("tenant",)
        ),
        (AdminPath.KEYS, "POST"): Service(
            name="create_key", summary="Make a key, which is shown this once", answer="ShownKey", body="NewKey"
        ),
        (AdminPath.KEY, "DELETE"): Service(name="revoke_key", summary="Let a key be good for nothing", answer="Key"),
        (AdminPath.ROTATION, "POST"): Service(
            name="rotate_key",
            summary="Make a key in the place of another, which is good for a while longer",
            answer="ShownKey",
            body="Rotation",
        ),
        (AdminPath.EVENTS, "GET"): Service(
            name="list_events", summary="What was changed, when and by whom", answer="EventList", query=("after",)
        ),
        (AdminPath.USAGE, "GET"): Service(
            name="show_usage",
            summary="Who used what",
            answer="UsageList",
            query=("by", "tenant", "since", "until", "format"),
        ),
        (AdminPath.OWN_USAGE, "GET"): Service(
            name="show_usage",
            summary="What the tenant of the key used",
            answer="UsageList",
            query=("by", "since", "until", "format"),
        ),
    }
)

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
    """A body: what it does not know is refused."""
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
