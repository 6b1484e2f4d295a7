"""The body of POST /v1/embeddings, and its answer: one vector for each input."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import Dialect
from serve_app.api.forms.form import FLAG, TOKEN_ID, Integer, OneOf, Parameter, Terms, Value
from serve_app.api.forms.names import NAME
from serve_app.api.forms.prompts import parse_prompts
from serve_app.api.forms.schema import Schema, array, either, string
from serve_app.api.groups import Amount, Target
from serve_app.api.limits import WireLimits
from serve_app.api.logprobs import numbers_text
from serve_app.api.parameters import (
    PARAMETERS,
    Carried,
    Disposition,
    Inert,
    NotYet,
    declared,
    form_of,
    read_fields,
    read_values,
)
from serve_app.api.responses import ResponseHead
from serve_app.api.sse import Fragment
from serve_app.core.delta import Recording, Usage
from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import Prompt
from serve_app.core.request import EmbeddingForm

ONE = "a non-empty string or a list of token ids"


class Inputs:
    """Every form of `input`: those of `prompt` without what is mixed or tagged."""

    def words(self, terms: Terms) -> str:
        return f"a string, a list of token ids, or a list of at most {terms.limits.max_inputs} strings or such lists"

    def schema(self, terms: Terms) -> Schema:
        limits = terms.limits
        text = string(least=1, most=limits.max_prompt_chars)
        tokens = array(TOKEN_ID, least=1, most=limits.max_prompt_ids)
        return either(text, tokens, array(either(text, tokens), least=1, most=limits.max_inputs))

    def read(self, value: Value) -> tuple[Prompt, ...]:
        limits = value.terms.limits
        if isinstance(value.sent, dict) or _is_mixed(value.sent):
            raise value.refused(self.words(value.terms))
        prompts = parse_prompts(value.sent, limits, name=value.name, max_prompts=limits.max_inputs)
        if isinstance(value.sent, list):
            for at, element in enumerate(value.sent):
                if isinstance(element, dict) or _is_mixed(element):
                    raise value.part_refused(at, ONE, element)
        return prompts


def _is_mixed(sent: object) -> bool:
    """Return whether it is a list of texts and token ids."""
    kinds = set(map(type, sent)) if isinstance(sent, list) else set()
    return str in kinds and bool(kinds & {int, float})


EMBEDDINGS: Mapping[str, Parameter] = {
    "model": Parameter(
        NAME, "A base model, an adapter as `base:adapter`, or an alias; the only one where one is served."
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


def table_of(parameters: Mapping[str, Parameter]) -> dict[str, Disposition]:
    """Return what is done with each name where these alone are carried out; hints of completions stay hints."""
    return {
        **{name: each if isinstance(each, Inert) else NotYet() for name, each in PARAMETERS.items()},
        "input_type": Inert(),  # no model that is served tells queries and documents apart by itself
        **{name: Carried(each) for name, each in parameters.items()},
    }


class EmbeddingRequest(CompletionRequest):
    """An embedding is a completion of no tokens, of whose prompt the hidden states are wanted.

    dimensions: None is all that the model has;  is_base64: how vectors are written
    table:      what is done with each name of a body;  required: names that it has
    described:  what a route does, and the names of the schemas of body and answer
    """

    dimensions: int | None = None
    is_base64: bool = False

    id_prefix: ClassVar[str] = "embd"
    prompt_name: ClassVar[str] = "input"
    table: ClassVar[Mapping[str, Disposition]] = table_of(EMBEDDINGS)
    required: ClassVar[tuple[str, ...]] = ("input",)
    described: ClassVar[tuple[str, str, str]] = ("Embed texts", "EmbeddingsRequest", "Embeddings")

    @classmethod
    def read(
        cls, members: Mapping[str, object], limits: WireLimits, dialect: Dialect, *, model: Callable[[], str]
    ) -> Self:
        """Return the request that these members of a JSON object make.

        model: asked where none was sent

        Raises InvalidRequest.
        """
        terms, table = Terms(limits=limits, dialect=dialect), cls.table
        fields = read_fields(members, table, refuses_unknown=dialect.refuses_unknown)
        values = read_values(fields, table, terms)
        for name in cls.required:
            if name not in values:
                raise InvalidRequest.refusing(name, must=f"be {form_of(name, table).words(terms)}", found="nothing")
        values["model"] = values.get("model") or model()
        values["ignored_parameters"] = tuple(fields.ignored)
        return cls(**cls._fields_of(values), max_tokens=0, dialect=dialect)

    @classmethod
    def _fields_of(cls, values: dict[str, Any]) -> dict[str, Any]:
        is_base64 = values.pop("encoding_format", None) == "base64"
        return {"prompts": values.pop("input"), "is_base64": is_base64, **values}

    def answer(
        self, head: ResponseHead, form: EmbeddingForm, recordings: Sequence[Recording], usage: Usage
    ) -> dict[str, object]:
        """Return the body. Writing many numbers takes a while, so call this off the event loop.

        form: by which the model read the inputs;  recordings: of each prompt, in order
        """
        counts: dict[str, object] = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        if usage.truncated_tokens:
            counts["prompt_tokens_details"] = {"truncated_tokens": usage.truncated_tokens}
        return {"object": "list", "data": self._items(form, recordings), "model": head.model, "usage": counts}

    def _items(self, form: EmbeddingForm, recordings: Sequence[Recording]) -> list[dict[str, object]]:
        return [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(v).decode() if self.is_base64 else Fragment(numbers_text(v)),
            }
            for index, v in enumerate(each.hidden_states for each in recordings)
        ]
