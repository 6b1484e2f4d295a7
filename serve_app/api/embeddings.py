"""The body of POST /v1/embeddings, and its answer: one vector for each input."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects.dialect import Dialect
from serve_app.api.dispositions import Carried, Disposition, Inert, NotYet
from serve_app.api.fields import read_fields
from serve_app.api.forms.form import Parameter, Terms, Value
from serve_app.api.forms.inputs import Inputs
from serve_app.api.forms.numbers import Integer
from serve_app.api.forms.plain import OneOf, Text
from serve_app.api.forms.shared import FLAG
from serve_app.api.fragments import Fragment
from serve_app.api.groups.amount import Amount
from serve_app.api.groups.target import Target
from serve_app.api.limits import WireLimits
from serve_app.api.parameters import PARAMETERS, declared
from serve_app.api.recordings import numbers_text
from serve_app.core.delta import Usage
from serve_app.core.errors import InvalidRequest
from serve_app.core.request import Recording


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
        **{name: declared(Amount)[name] for name in ("truncate_prompt_tokens", "truncation_side")},
        "user": declared(Target)["user"],
    }
)
_TABLE: Mapping[str, Disposition] = MappingProxyType(
    {
        **{name: each if isinstance(each, Inert) else NotYet() for name, each in PARAMETERS.items()},
        "input_type": Inert(),  # no model that is served tells queries and documents apart by itself
        **{name: Carried(each) for name, each in EMBEDDINGS.items()},
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


def read_embeddings(
    members: Mapping[str, object], limits: WireLimits, dialect: Dialect, *, model: Callable[[], str]
) -> EmbeddingRequest:
    """The request that these members of a JSON object make.

    model: asked where none was sent

    Raises InvalidRequest.
    """
    terms = Terms(limits=limits, dialect=dialect)
    fields = read_fields(members, _TABLE, refuses_unknown=dialect.refuses_unknown)
    values: dict[str, Any] = {
        name: EMBEDDINGS[name].form.read(Value(name=name, sent=sent, terms=terms))
        for name, sent in fields.values.items()
    }
    if "input" not in values:
        raise InvalidRequest.refusing("input", must=f"be {EMBEDDINGS['input'].form.words(terms)}", found="nothing")
    is_base64 = values.pop("encoding_format", None) == "base64"
    return EmbeddingRequest(
        **{"model": values.pop("model", None) or model(), "prompts": values.pop("input"), **values},
        max_tokens=0,
        dialect=dialect,
        ignored_parameters=tuple(fields.ignored),
        is_base64=is_base64,
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
