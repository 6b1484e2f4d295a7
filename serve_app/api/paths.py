"""The paths of the service and their methods, stated once for routing, metrics and description."""

from __future__ import annotations

from enum import StrEnum

from serve_app.core.tenants import Scope


class Path(StrEnum):
    """One route; what is in braces is the client's."""

    FRONT = "/"
    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    EMBEDDINGS = "/v1/embeddings"
    NATIVE_COMPLETION = "/completion"
    NATIVE_COMPLETIONS = "/completions"
    INFILL = "/infill"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"
    APPLY_TEMPLATE = "/apply-template"
    EXPLAIN = "/v1/explain"
    TOKENIZER_INFO = "/tokenizer_info"
    MODELS = "/v1/models"
    MODEL = "/v1/models/{id}"
    DIALECTS = "/v1/dialects"
    PROPS = "/props"
    ADAPTERS = "/lora-adapters"
    LOAD_ADAPTER = "/v1/load_lora_adapter"
    UNLOAD_ADAPTER = "/v1/unload_lora_adapter"
    HEALTH = "/health"
    V1_HEALTH = "/v1/health"
    METRICS = "/metrics"
    DESCRIPTION = "/openapi.json"
    DOCS = "/docs"
    LIVE = "/live"
    CONSOLE = "/console"
    CONSOLE_FILE = "/console/{file}"

    @property
    def method(self) -> str:
        return "POST" if self in POSTED else "GET"

    @property
    def scope(self) -> Scope | None:
        """Return the scope that a key needs; None if any key will do."""
        if self in WATCHING:
            return Scope.METRICS
        if self in PUBLISHING:
            return Scope.ADAPTERS_WRITE
        return None if self in DESCRIBING else Scope.INFER


POSTED = frozenset(
    {
        Path.COMPLETIONS,
        Path.CHAT,
        Path.RESPONSES,
        Path.EMBEDDINGS,
        Path.NATIVE_COMPLETION,
        Path.NATIVE_COMPLETIONS,
        Path.INFILL,
        Path.TOKENIZE,
        Path.DETOKENIZE,
        Path.APPLY_TEMPLATE,
        Path.EXPLAIN,
        Path.LOAD_ADAPTER,
        Path.UNLOAD_ADAPTER,
    }
)
PUBLISHING = frozenset({Path.LOAD_ADAPTER, Path.UNLOAD_ADAPTER})
WATCHING = frozenset({Path.METRICS, Path.LIVE})
DESCRIBING = frozenset({Path.DESCRIPTION, Path.DOCS, Path.DIALECTS, Path.V1_HEALTH})
OPEN = frozenset({Path.HEALTH, Path.FRONT, Path.CONSOLE, Path.CONSOLE_FILE})
"""Answered to whoever asks, key or none. The front and the console's files are the same for everybody and hold nothing
of a service; the page that asks for a key, and the way there, have to be there before the key is."""


class AdminPath(StrEnum):
    """One route of administrators or of a tenant's own usage. All but those of adapters are there only with keys."""

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

    @property
    def scope(self) -> Scope | None:
        """Return the scope that a key needs; None if any key will do."""
        return None if self is AdminPath.OWN_USAGE else Scope.ADMIN


OF_ADAPTERS = frozenset({AdminPath.ADAPTERS, AdminPath.ROLLBACK})
