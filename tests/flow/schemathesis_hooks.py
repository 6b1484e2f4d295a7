"""What schemathesis.toml asks for before each request: a body that is to be taken obeys the contract's prose."""

from __future__ import annotations

import json
import os
import urllib.request
from functools import cache
from typing import Any

import schemathesis

from tests.flow.prose import Body, Served, fitting, obey

HEADER = "X-Completions-Dialect"
CONFIGURABLE = ("/v1/completions", "/v1/chat/completions")
NATIVE = ("/completion", "/completions", "/infill")


@cache
def answer(path: str) -> Any:
    with urllib.request.urlopen(os.environ["SERVED"] + path) as response:
        return json.load(response)


@cache
def served(path: str) -> Served:
    """llama.cpp's own routes are described in its dialect."""
    listing = answer("/v1/dialects")
    name = "llama.cpp" if path in NATIVE else listing["default"]
    (dialect,) = [each for each in listing["data"] if each["name"] == name]
    if path == "/v1/chat/completions":
        dialect = {
            **dialect, **{part: {**dialect[part], **dialect["chat"][part]} for part in ("parameters", "defaults")}
        }  # fmt: skip
    models = [each["id"] for each in answer("/v1/models")["data"]]
    return Served(dialect=dialect, models=tuple(models[:2]), vocab_size=answer("/props")["n_vocab"])


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """The body is described in one dialect, so a request that is to be taken names no other."""
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if case.path in ("/tokenizer_info", "/props", "/lora-adapters") and case.query:
        case.query = {**case.query, "model": served(case.path).models[0]}
    if isinstance(case.body, dict):
        case.body = obeying(case.body, case.path)
        case.headers.pop(HEADER, None)


def fitting_texts(sent: Any) -> Any:
    """The first texts, without what may not fit the context."""
    match sent:
        case list():
            return [fitting_texts(each) for each in sent[:4]]
        case {"text": text}:
            return {"text": text[:64]}
    return sent[:64]


def obeying(body: Body, path: str) -> Body:
    of_path = served(path)
    if path in (*CONFIGURABLE, *NATIVE):
        return obey(body, of_path)
    if body.get("model") is not None:
        body = {**body, "model": of_path.models[0]}
    match path:
        case "/detokenize":
            return {**body, "tokens": fitting(body["tokens"], of_path)}
        case "/v1/embeddings":
            return {**body, "input": fitting(body["input"], of_path), "dimensions": None}
        case "/rerank" | "/v1/rerank" | "/v2/rerank":
            return {**body, "query": fitting(body["query"], of_path), "documents": fitting_texts(body["documents"])}
        case "/score" | "/v1/score":
            pair = {name: fitting_texts(body[name]) for name in ("text_1", "text_2")}
            return obey({**body, **pair}, of_path, is_completion=False)
        case "/tokenize" | "/apply-template" if body.get("messages"):
            return obey(body, of_path, is_completion=False)
    return body
