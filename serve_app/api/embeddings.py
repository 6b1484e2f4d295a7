"""The body of POST /v1/embeddings, and its answer: one vector for each input."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects.dialect import Dialect
from serve_app.api.forms.form import Parameter, Terms
from serve_app.api.forms.inputs import Inputs
from serve_app.api.forms.numbers import Integer
from serve_app.api.forms.plain import OneOf, Text
from serve_app.api.forms.shared import FLAG
from serve_app.api.fragments import Fragment
from serve_app.api.limits import WireLimits
from serve_app.api.members import read_members
from serve_app.api.paths import Path
from serve_app.api.recordings import numbers_text
from serve_app.core.delta import Usage
from serve_app.core.recording import Recording


def _max_model_chars(terms: Terms) -> int:
    return terms.limits.max_model_chars


EMBEDDINGS: Mapping[str, Parameter] = MappingProxyType(
    {
        "model": Parameter(
            Text(min_chars=1, max_chars=_max_model_chars),
            "A base model, an adapter as `base:adapter`, or an alias; the only one where one is served.",
        ),
        "input": Parameter(Inputs(), "What is embedded; every input of a list by itself."),
        "encoding_format": Parameter(
            OneOf("float", "base64"), "A vector as a list of numbers, or as base64 of little-endian float32."
        ),
        "dimensions": Parameter(
            Integer(low=1), "Numbers of a vector, where the model was trained to have them cut to so many."
        ),
        "truncate_sequence": Parameter(FLAG, "An input that does not fit the context loses its beginning."),
        "user": Parameter(Text(), "Names the end user for abuse reports; the vectors are the same."),
    }
)


class EmbeddingRequest(CompletionRequest):
    """An embedding is a completion of no tokens, of whose prompt the hidden states are wanted.

    dimensions: None is all that the model has;  is_base64: how vectors are written
    """

    dimensions: int | None = None
    is_base64: bool = False

    id_prefix: ClassVar[str] = "embd"
    prompt_name: ClassVar[str] = "input"


def parse_embeddings(body: bytes, limits: WireLimits) -> dict[str, Any]:
    """The members that were sent. Raises InvalidRequest."""
    return read_members(body, EMBEDDINGS, limits, path=Path.EMBEDDINGS, required="input")


def embedding_request(values: Mapping[str, Any], model: str, dialect: Dialect) -> EmbeddingRequest:
    """The request that these members make."""
    return EmbeddingRequest(
        model=model,
        prompts=values["input"],
        user=values.get("user"),
        truncate_sequence=values.get("truncate_sequence", False),
        max_tokens=0,
        dialect=dialect,
        dimensions=values.get("dimensions"),
        is_base64=values.get("encoding_format") == "base64",
    )


def embeddings_body(request: EmbeddingRequest, recordings: Sequence[Recording], *, usage: Usage) -> dict[str, object]:
    """To write vectors as numbers takes a while: not on an event loop."""
    show = _base64 if request.is_base64 else _numbers
    counts: dict[str, object] = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    if usage.truncated_tokens:
        counts["prompt_tokens_details"] = {"truncated_tokens": usage.truncated_tokens}
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": show(recording.hidden_states)}
            for index, recording in enumerate(recordings)
        ],
        "model": request.model,
        "usage": counts,
    }


def _base64(vector: bytes) -> object:
    return base64.b64encode(vector).decode("ascii")


def _numbers(vector: bytes) -> object:
    return Fragment(numbers_text(vector))
