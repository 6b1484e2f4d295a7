"""What OpenAPI tells besides where keys are asked for: how to send one, and the routes of administrators."""

from __future__ import annotations

from typing import Any

from serve_app.api.admin import ADMIN_SCHEMAS, SERVICES, Service
from serve_app.api.openapi_schemas import STRING, reference
from serve_app.api.paths import OPEN, AdminPath

SCHEMES: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer sa-…`"},
    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
REFUSALS = {
    401: "There is no key, or one that is unknown, has expired or was revoked.",
    403: "The key is for something else.",
}
FAILURES = {
    400: "A field is unknown or out of its range; the message names it.",
    404: "There is no such tenant or key.",
    413: "The body is larger than the server reads.",
    415: "The body is not JSON.",
    405: "The route has other methods; `Allow` names them.",
    408: "The body did not arrive in time.",
    500: "The server failed.",
    503: "The store of tenants does not answer; repeat after `Retry-After` seconds.",
}


def with_keys(document: dict[str, Any]) -> dict[str, Any]:
    """The description of the same service with a door."""
    paths: dict[str, Any] = {
        path: {method: {**each, **_guarded(path, each["responses"])} for method, each in operations.items()}
        for path, operations in document["paths"].items()
    }
    for (path, method), service in SERVICES.items():
        paths.setdefault(path.value, {})[method.lower()] = _operation(path, service)
    components = document["components"]
    return {
        **document,
        "security": [{name: []} for name in SCHEMES],
        "paths": paths,
        "components": {"schemas": {**components["schemas"], **ADMIN_SCHEMAS}, "securitySchemes": SCHEMES},
    }


def _guarded(path: str, responses: dict[str, Any]) -> dict[str, Any]:
    if path in OPEN:
        return {"security": []}
    return {"responses": {**responses, **_told(REFUSALS)}}


def _operation(path: AdminPath, service: Service) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": service.summary,
        "responses": {
            "200": {"description": service.summary, "content": _json(service.answer)},
            **_told(REFUSALS | FAILURES),
        },
    }
    names = [("path", name, True) for name in ("name", "id") if f"{{{name}}}" in path]
    names += [("query", name, False) for name in service.query]
    if names:
        operation["parameters"] = [
            {"name": name, "in": place, "required": is_required, "schema": STRING} for place, name, is_required in names
        ]
    if service.body is not None:
        operation["requestBody"] = {"required": service.name != "rotate_key", "content": _json(service.body)}
    return operation


def _told(errors: dict[int, str]) -> dict[str, Any]:
    return {str(status): {"description": text, "content": _json("Error")} for status, text in errors.items()}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": reference(name)}}
