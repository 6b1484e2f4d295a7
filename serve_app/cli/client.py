"""Talks to a running service, with nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

TIMEOUT_S = 600.0
KEY_VARIABLE = "SERVE_APP_KEY"
"""Environment variable with a key, which stays out of the list of processes there."""


class ServiceFailed(Exception):
    """The service could not be reached, or answered with an error; the message is for a person."""


def list_models(url: str) -> list[str]:
    """Every name that can be sent as `model`. Raises ServiceFailed."""
    with _open(f"{url}/v1/models") as response:
        return [entry["id"] for entry in json.load(response)["data"]]


def complete(url: str, body: Mapping[str, object]) -> Iterator[str]:
    """The completion's text, in as many pieces as the service sends. Raises ServiceFailed."""
    with _open(f"{url}/v1/completions", body) as response:
        if not body.get("stream"):
            yield json.load(response)["choices"][0]["text"]
            return
        for line in response:
            data = line.decode().removeprefix("data:").strip()
            if not line.startswith(b"data:") or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise ServiceFailed(chunk["error"]["message"])
            yield "".join(choice["text"] for choice in chunk["choices"])


def _key() -> dict[str, str]:
    """The header with the caller's key, where there is one."""
    key = os.environ.get(KEY_VARIABLE, "")
    return {"authorization": f"Bearer {key}"} if key else {}


def _open(url: str, body: Mapping[str, object] | None = None) -> http.client.HTTPResponse:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **_key()})
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)  # nosec B310 # a person's
    except urllib.error.HTTPError as error:
        with error:
            raise ServiceFailed(_told(error.read(), f"status {error.code}")) from error
    except (urllib.error.URLError, ValueError) as error:
        raise ServiceFailed(f"{url} cannot be reached: {getattr(error, 'reason', error)}") from error
    return response


def _told(body: bytes, otherwise: str) -> str:
    """The message of an error body, where it is one."""
    try:
        content: Any = json.loads(body)
        return str(content["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return otherwise
