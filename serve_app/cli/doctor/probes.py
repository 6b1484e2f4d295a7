"""Asks a service what it answers to somebody without a key, and Ray's dashboard what it answers without its token."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from urllib.parse import urlsplit

from serve_app.api.paths import OPEN, AdminPath, Path
from serve_app.cli.doctor.facts import Answer

TIMEOUT_S = 5.0
MAX_BODY_BYTES = 64 << 10
LONG_HEADER = 70_000
"""Characters, more than a client may send of headers in all (docs/operations.md, Headers)."""
NOWHERE = "/no/such/route"
STRANGE_ORIGIN = "https://doctor.invalid"

PROBES: Mapping[str, tuple[str, str, Mapping[str, str]]] = MappingProxyType(
    {
        "health": ("GET", "/health", {}),
        "nowhere": ("GET", NOWHERE, {}),
        "long headers": ("GET", "/health", {"x-doctor": "x" * LONG_HEADER}),
        "time limit": ("GET", "/health", {"x-request-timeout-seconds": "30"}),
        "staying": ("GET", "/health", {"x-request-disconnect-disabled": "?1"}),
        "large body": ("POST", "/tokenize", {"content-length": str(1 << 40), "content-type": "application/json"}),
        "strange page": ("GET", "/health", {"origin": STRANGE_ORIGIN}),
        "page": ("GET", "/docs", {}),
        "console": ("GET", "/console", {}),
    }
)
"""Method, path and headers of each; of a body nothing is sent."""
RAY_PATHS = ("/api/jobs/", "/api/serve/applications/")


def ask(url: str, method: str, path: str, headers: Mapping[str, str]) -> Answer | None:
    """None where nothing that is HTTP comes back in time. Certificates are not looked at: nothing secret is sent."""
    connection = _connection(url)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        body = response.read(MAX_BODY_BYTES).decode(errors="replace")
        named = {name.lower(): value for name, value in response.getheaders()}
        return Answer(status=response.status, headers=named, body=body)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def answers_of(url: str, key: str | None) -> dict[str, Answer]:
    """What came back of each probe. key: for the page, which is nobody's without one"""
    asked = {name: ask(url, method, path, headers) for name, (method, path, headers) in PROBES.items()}
    if key is not None:
        asked["page"] = ask(url, "GET", "/docs", {"authorization": f"Bearer {key}"})
    return {name: answer for name, answer in asked.items() if answer is not None}


def anonymous_statuses(url: str) -> dict[tuple[str, str], int]:
    """Of every route that somebody without a key must not have."""
    asked = ((route, ask(url, *route, {"content-length": "0"} if route[0] != "GET" else {})) for route in routes())
    return {route: answer.status for route, answer in asked if answer is not None}


def routes() -> Iterator[tuple[str, str]]:
    """Method and path, with a name that nothing has in the place of names."""
    for path in Path:
        if path not in OPEN:
            yield path.method, path.replace("{id}", "doctor")
    for admin in AdminPath:
        yield "GET", admin.replace("{name}", "doctor").replace("{id}", "doctor")


def _connection(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(parts.netloc, timeout=TIMEOUT_S, context=context)
    return http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S)
