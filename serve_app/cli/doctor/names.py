"""Asks a service with an address in the place of an image and a folder in that of an adapter: none may be followed."""

from __future__ import annotations

import json
import select
import socket

from serve_app.api.paths import Path
from serve_app.cli.doctor.facts import Answer
from serve_app.cli.doctor.probes import KEY_HEADER, ask

FOLDER = "../doctor"


def tried(url: str, key: str | None) -> tuple[Answer | None, bool]:
    """What was answered to the folder, and whether the address was asked for; nothing is tried without a model."""
    headers = {} if key is None else {KEY_HEADER: f"Bearer {key}"}
    model = _model(ask(url, "GET", Path.MODELS, headers))
    if model is None:
        return None, False
    headers["content-type"] = "application/json"
    body = {"model": f"{model}:{FOLDER}", "prompt": "a", "max_tokens": 1}
    return ask(url, "POST", Path.COMPLETIONS, headers, _encoded(body)), _is_fetched(url, headers, model)


def _is_fetched(url: str, headers: dict[str, str], model: str) -> bool:
    """Whether anybody came to a socket of ours that a request named."""
    with socket.create_server(("127.0.0.1", 0)) as ours:
        image = {"url": f"http://127.0.0.1:{ours.getsockname()[1]}/doctor.png"}
        parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": image}]
        body = {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        ask(url, "POST", Path.CHAT, headers, _encoded(body))
        return bool(select.select([ours], [], [], 0)[0])


def _model(listed: Answer | None) -> str | None:
    """A base model of the list."""
    try:
        names = [each["id"] for each in json.loads(listed.body)["data"]] if listed is not None else []
    except (ValueError, KeyError, TypeError):
        return None
    return next((name for name in names if isinstance(name, str) and ":" not in name), None)


def _encoded(body: object) -> bytes:
    return json.dumps(body).encode()
