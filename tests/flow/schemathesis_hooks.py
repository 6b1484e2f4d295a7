"""What schemathesis.toml asks for before each request: a body that is to be taken obeys the contract's prose."""

from __future__ import annotations

import json
import os
import urllib.request
from functools import cache
from typing import Any

import schemathesis

from tests.flow.prose import Served, fitting, obey

HEADER = "X-Completions-Dialect"
COMPLETIONS = ("/v1/completions", "/completion", "/completions")


@cache
def answer(path: str) -> Any:
    with urllib.request.urlopen(os.environ["SERVED"] + path) as response:
        return json.load(response)


@cache
def served(path: str) -> Served:
    """llama.cpp's own routes are described in its dialect."""
    listing = answer("/v1/dialects")
    name = listing["default"] if path == "/v1/completions" else "llama.cpp"
    (dialect,) = [each for each in listing["data"] if each["name"] == name]
    models = [each["id"] for each in answer("/v1/models")["data"]]
    return Served(dialect=dialect, models=tuple(models[:2]), vocab_size=answer("/props")["n_vocab"])


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """The body is described in one dialect, so a request that is to be taken names no other."""
    if case.meta is None or not case.meta.generation.mode.is_positive or not isinstance(case.body, dict):
        return
    if case.path in COMPLETIONS:
        case.body = obey(case.body, served(case.path))
        case.headers.pop(HEADER, None)
    elif case.path == "/detokenize":
        case.body = {**case.body, "tokens": [fitting([each], served(case.path))[0] for each in case.body["tokens"]]}
