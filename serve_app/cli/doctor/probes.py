"""Asks a service what it answers to somebody without a key, and to what nobody may do; and Ray's dashboard."""

from __future__ import annotations

import http.client
import json
import select
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing
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
KEY_HEADER = "authorization"
FOLDER = "../doctor"
"""A place that no adapter's name may lead to."""
RAY_PATHS = ("/api/jobs/", "/api/serve/applications/")


def ask(url: str, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> Answer | None:
    """None where nothing that is HTTP comes back in time, and where a key would go to whom no certificate names."""
    connection: http.client.HTTPConnection | None = None
    try:
        connection = _connection(url, is_verified=KEY_HEADER in headers)
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        text = response.read(MAX_BODY_BYTES).decode(errors="replace")
        named = {name.lower(): value for name, value in response.getheaders()}
        return Answer(status=response.status, headers=named, body=text)
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        if connection is not None:
            connection.close()


def doubt_of(url: str) -> str | None:
    """Return why this machine trusts no name of the certificate there; None where it does, or there is none."""
    if not url.startswith("https:"):
        return None
    try:
        with closing(_connection(url, is_verified=True)) as connection:
            connection.connect()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return None


def answers_of(url: str, key: str | None) -> dict[str, Answer]:
    """Return what came back of each probe. key: for the page, which is nobody's without one

    No certificate is looked at where nothing secret is sent: what stands behind it is asked in any case.
    """
    asked = {name: ask(url, method, path, headers) for name, (method, path, headers) in PROBES.items()}
    if key is not None:
        asked["page"] = ask(url, "GET", "/docs", {KEY_HEADER: f"Bearer {key}"})
    return {name: answer for name, answer in asked.items() if answer is not None}


def anonymous_statuses(url: str) -> dict[tuple[str, str], int]:
    """Return the status of every route that somebody without a key must not have."""
    asked = ((route, ask(url, *route, {"content-length": "0"} if route[0] != "GET" else {})) for route in routes())
    return {route: answer.status for route, answer in asked if answer is not None}


def routes() -> Iterator[tuple[str, str]]:
    """Yield method and path, with a name that nothing has in the place of names."""
    for path in Path:
        if path not in OPEN:
            yield path.method, path.replace("{id}", "doctor")
    for admin in AdminPath:
        yield "GET", admin.replace("{name}", "doctor").replace("{id}", "doctor")


def tried(url: str, key: str | None) -> tuple[Answer | None, bool]:
    """Return the answer to the folder, and whether the address was asked for; nothing is tried without a model."""
    headers = {} if key is None else {KEY_HEADER: f"Bearer {key}"}
    model = _model(ask(url, "GET", Path.MODELS, headers))
    if model is None:
        return None, False
    headers["content-type"] = "application/json"
    body = {"model": f"{model}:{FOLDER}", "prompt": "a", "max_tokens": 1}
    return ask(url, "POST", Path.COMPLETIONS, headers, _encoded(body)), _is_fetched(url, headers, model)


def _connection(url: str, *, is_verified: bool) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme == "https":
        context = ssl.create_default_context()
        if not is_verified:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(parts.netloc, timeout=TIMEOUT_S, context=context)
    return http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S)


def _is_fetched(url: str, headers: dict[str, str], model: str) -> bool:
    """Return whether anybody came to a socket of ours that a request named."""
    with socket.create_server(("127.0.0.1", 0)) as ours:
        image = {"url": f"http://127.0.0.1:{ours.getsockname()[1]}/doctor.png"}
        parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": image}]
        body = {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        ask(url, "POST", Path.CHAT, headers, _encoded(body))
        return bool(select.select([ours], [], [], 0)[0])


def _model(listed: Answer | None) -> str | None:
    """Return a base model of the list."""
    try:
        names = [each["id"] for each in json.loads(listed.body)["data"]] if listed is not None else []
    except (ValueError, KeyError, TypeError):
        return None
    return next((name for name in names if isinstance(name, str) and ":" not in name), None)


def _encoded(body: object) -> bytes:
    return json.dumps(body).encode()
