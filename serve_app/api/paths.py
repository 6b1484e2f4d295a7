"""The paths of the service and their methods, stated once for routing, metrics and description."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from serve_app.core.batches import CREATE_BATCH
from serve_app.core.tenants import Scope


class Path(StrEnum):
    """One route; what is in braces is the client's.

    scope: that a key needs; None if any key will do
    """

    method: str
    scope: Scope | None

    def __new__(cls, path: str, method: str = "GET", scope: Scope | None = Scope.INFER) -> Path:
        made = str.__new__(cls, path)
        made._value_, made.method, made.scope = path, method, scope
        return made

    FRONT = "/"
    COMPLETIONS = "/v1/completions", "POST"
    COMPLETION = "/v1/completions/{id}"
    CHAT = "/v1/chat/completions", "POST"
    CHAT_COMPLETION = "/v1/chat/completions/{id}"
    CAPSULE = "/v1/capsules/{id}"
    RESPONSES = "/v1/responses", "POST"
    EMBEDDINGS = "/v1/embeddings", "POST"
    RERANK = "/rerank", "POST"
    V1_RERANK = "/v1/rerank", "POST"
    V2_RERANK = "/v2/rerank", "POST"
    SCORE = "/score", "POST"
    V1_SCORE = "/v1/score", "POST"
    CLASSIFY = "/classify", "POST"
    V1_CLASSIFY = "/v1/classify", "POST"
    NATIVE_COMPLETION = "/completion", "POST"
    NATIVE_COMPLETIONS = "/completions", "POST"
    INFILL = "/infill", "POST"
    TOKENIZE = "/tokenize", "POST"
    DETOKENIZE = "/detokenize", "POST"
    APPLY_TEMPLATE = "/apply-template", "POST"
    EXPLAIN = "/v1/explain", "POST"
    TOKENIZER_INFO = "/tokenizer_info"
    MODELS = "/v1/models"
    MODEL = "/v1/models/{id}"
    DIALECTS = "/v1/dialects", "GET", None
    PROPS = "/props"
    ADAPTERS = "/lora-adapters"
    LOAD_ADAPTER = "/v1/load_lora_adapter", "POST", Scope.ADAPTERS_WRITE
    UNLOAD_ADAPTER = "/v1/unload_lora_adapter", "POST", Scope.ADAPTERS_WRITE
    HEALTH = "/health"
    V1_HEALTH = "/v1/health", "GET", None
    READY = "/ready"
    METRICS = "/metrics", "GET", Scope.METRICS
    DESCRIPTION = "/openapi.json", "GET", None
    DOCS = "/docs", "GET", None
    LIVE = "/live", "GET", Scope.METRICS
    CONSOLE = "/console"
    CONSOLE_FILE = "/console/{file}"


WATCHING = frozenset({Path.METRICS, Path.LIVE})
OPEN = frozenset({Path.HEALTH, Path.READY, Path.FRONT, Path.DOCS, Path.CONSOLE, Path.CONSOLE_FILE})
"""Answered to whoever asks, key or none. The front and the console's files are the same for everybody and hold nothing
of a service; the page that asks for a key, and the way there, have to be there before the key is."""


class AdminPath(StrEnum):
    """One route of administrators, or of what a tenant keeps. All but those of adapters need keys."""

    TENANTS = "/admin/tenants"
    TENANT = "/admin/tenants/{name}"
    KEYS = "/admin/keys"
    KEY = "/admin/keys/{id}"
    ROTATION = "/admin/keys/{id}/rotate"
    EVENTS = "/admin/events"
    USAGE = "/admin/usage"
    ADAPTERS = "/admin/adapters"
    ROLLBACK = "/admin/adapters/rollback"
    OWN_USAGE = "/v1/usage"
    FILES = "/v1/files"
    FILE = "/v1/files/{id}"
    FILE_CONTENT = "/v1/files/{id}/content"
    BATCHES = "/v1/batches"
    BATCH = "/v1/batches/{id}"
    CANCELLATION = "/v1/batches/{id}/cancel"

    @property
    def scope(self) -> Scope | None:
        """Return the scope that a key needs; None if any key will do."""
        if self in OF_BATCHES:
            return Scope.INFER
        return None if self is AdminPath.OWN_USAGE else Scope.ADMIN


NAMED = {path.removesuffix("{id}"): path for path in Path if path.endswith("{id}")}
"""Paths that end in the name of one thing, by what stands before it."""
KNOWN: dict[str, Path] = {path.value: path for path in Path if "{" not in path}
CONSOLE_FILE = re.compile(re.escape(Path.CONSOLE_FILE.removesuffix("{file}")) + r"[a-z][a-z-]*\.(?:css|js|svg)")
ADMIN_PREFIX = "/admin/"
ADMIN_PREFIXES = (ADMIN_PREFIX, AdminPath.OWN_USAGE, AdminPath.FILES, AdminPath.BATCHES)
ADMIN_PATTERNS = {path: re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for path in AdminPath}


def path_of(path: str) -> Path | AdminPath | None:
    """Return the path of the service that this is; None if there is none."""
    found = KNOWN.get(path)
    if found is not None:
        return found
    for prefix, named in NAMED.items():
        if path.startswith(prefix):
            return named
    if CONSOLE_FILE.fullmatch(path):
        return Path.CONSOLE_FILE
    if not path.startswith(ADMIN_PREFIXES):
        return None
    return next((each for each, pattern in ADMIN_PATTERNS.items() if pattern.fullmatch(path)), None)


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
PAGE = ("after", "limit", "order")
_CHANGED = "What was changed, when and by whom"
_ROTATED = "Make a key in the place of another, which stays valid for a while"
SERVICES: Mapping[tuple[AdminPath, str], Service] = {
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
        (AdminPath.FILES, "GET"): Service("list_files", "List files", "FileList", query=(*PAGE, "purpose")),
        (AdminPath.FILES, "POST"): Service("add_file", "Send a file of requests", "File", "NewFile"),
        (AdminPath.FILE, "GET"): Service("show_file", "One file", "File"),
        (AdminPath.FILE, "DELETE"): Service("delete_file", "Delete a file", "DeletedFile"),
        (AdminPath.FILE_CONTENT, "GET"): Service("read_file", "What is in a file", ""),
        (AdminPath.BATCHES, "GET"): Service("list_batches", "List batches", "BatchList", query=PAGE),
        (AdminPath.BATCHES, "POST"): Service(CREATE_BATCH, "Have a file's requests computed", "Batch", "NewBatch"),
        (AdminPath.BATCH, "GET"): Service("show_batch", "One batch", "Batch"),
        (AdminPath.CANCELLATION, "POST"): Service("cancel_batch", "Compute no more of a batch", "Batch"),
    }  # fmt: skip
OF_ADAPTERS = frozenset({AdminPath.ADAPTERS, AdminPath.ROLLBACK})
OF_BATCHES = frozenset(path for path in AdminPath if path.startswith((AdminPath.FILES, AdminPath.BATCHES)))
"""Routes of a tenant's own files and batches."""
