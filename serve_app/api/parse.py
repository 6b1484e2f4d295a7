"""Turns the members of a request into a `CompletionRequest`, or says which parameter is wrong and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from serve_app.api.chat import CHAT_DEFAULTS, CHAT_PARAMETERS, ChatRequest
from serve_app.api.completion import CompletionRequest
from serve_app.api.contradictions import Sent, check_contradictions
from serve_app.api.dialects import ONLY_MODEL, Dialect
from serve_app.api.forms.form import Parameter, Paths, Terms, Value
from serve_app.api.forms.images import illustrated
from serve_app.api.groups import StreamOptions
from serve_app.api.limits import WireLimits
from serve_app.api.parameters import (
    PARAMETERS,
    STREAM_OPTIONS,
    Carried,
    Disposition,
    Fields,
    Renamed,
    form_of,
    is_same,
    read_fields,
)
from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import Prompt

Request = TypeVar("Request", bound=CompletionRequest)
RESPONSE_FIELDS = Parameter(
    Paths(),
    "These fields alone are in a whole result, and in the last of a stream; `timings/predicted_n` is one of an object.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Body(Generic[Request]):
    """One kind of body: what its members are, and the request that they make.

    defaults: of parameters that were not sent, where the dialect says nothing of them
    default_model: what `model` is where it was not sent, whatever the dialect; None leaves it to that
    """

    request: type[Request]
    table: Mapping[str, Disposition]
    required: tuple[str, ...]
    defaults: Mapping[str, object] = field(default_factory=dict)
    default_model: str | None = None


COMPLETION = Body(request=CompletionRequest, table=PARAMETERS, required=("model", "prompt"))
CHAT = Body(
    request=ChatRequest,
    table=CHAT_PARAMETERS,
    required=("model", "messages"),
    defaults=CHAT_DEFAULTS,
    default_model=ONLY_MODEL,
)
NATIVE = Body(
    request=CompletionRequest,
    table=MappingProxyType({**PARAMETERS, "response_fields": Carried(RESPONSE_FIELDS)}),
    required=("model", "prompt"),
)


def read_request(
    kind: Body[Request],
    members: Mapping[str, object],
    limits: WireLimits,
    *,
    dialect: Dialect,
    ignored: Sequence[str] = (),
) -> Request:
    """Return the request that these members of a JSON object make, with the defaults of its dialect.

    ignored: what was left out of them before

    Raises InvalidRequest (or UnsupportedParameter) whose `param` is the parameter as the client spelled it.
    """
    terms = Terms(limits=limits, dialect=dialect)
    members, overruled = _without_overruled(members, dialect)
    fields = read_fields(members, kind.table, refuses_unknown=dialect.refuses_unknown)
    if (default_model := kind.default_model or dialect.default_model) is not None:
        fields.values.setdefault("model", default_model)
    for name in kind.required:
        disposition = kind.table[name]
        if (disposition.to if isinstance(disposition, Renamed) else name) not in fields.values:
            raise InvalidRequest.refusing(name, must=f"be {form_of(name, kind.table).words(terms)}", found="nothing")
    values = _completion_values(fields, kind.table, terms)
    overruled += _without_overruled_constraints(values, fields, dialect)
    internal = {
        "dialect": dialect,
        "max_tokens_name": fields.spelled("max_tokens"),
        "sends_max_tokens": values.get("max_tokens") is not None,
        "ignored_parameters": (*ignored, *overruled, *fields.ignored),
        "max_total_tokens": limits.max_total_tokens,
    }
    request = kind.request.model_validate({**kind.defaults, **dialect.defaults, **values, **internal})
    check_contradictions(Sent(request=request, fields=fields, limits=limits))
    return request


def _completion_values(fields: Fields, table: Mapping[str, Disposition], terms: Terms) -> dict[str, object]:
    """Return what was sent as a request's fields hold it; unknown stream options join the ignored names."""
    values = _read_values(fields, table, terms)
    if "prompt" in values:
        values["prompts"] = _prompts(values, fields, terms)
    top_logprobs = values.pop("top_logprobs", None)
    if fields.values.get("logprobs") is True and top_logprobs is not None:
        values["logprobs"] = top_logprobs
    if isinstance(values.get("logprobs"), bool):
        values["logprobs"] = 0 if values["logprobs"] else None
    if "stream_options" in values:
        options = _read_options(values["stream_options"], terms)
        fields.ignored += options.ignored
        values["stream_options"] = StreamOptions.model_validate(_read_values(options, STREAM_OPTIONS, terms))
    if "mirostat_target" in fields.names:
        values.setdefault("mirostat", 2)
    return values


def _prompts(values: dict[str, object], fields: Fields, terms: Terms) -> tuple[Prompt, ...]:
    """Take the prompts out of the values and put the images that came beside them into their places."""
    prompts: Any = values.pop("prompt")
    images: Any = values.get("images", ())
    return illustrated(prompts, images, name=fields.spelled("images"), limits=terms.limits)


def _read_values(fields: Fields, table: Mapping[str, Disposition], terms: Terms) -> dict[str, object]:
    """Read each value by its form. Raises InvalidRequest."""
    values = {}
    for name, sent in fields.values.items():
        spelled = fields.spelled(name)
        form = form_of(spelled if spelled in table else name, table)
        values[name] = form.read(Value(name=spelled, sent=sent, terms=terms, ignored=fields.ignored))
    return values


def _read_options(members: object, terms: Terms) -> Fields:
    assert isinstance(members, dict)
    refuses_unknown = terms.dialect.refuses_unknown
    return read_fields(members, STREAM_OPTIONS, within="stream_options.", refuses_unknown=refuses_unknown)


def _without_overruled(members: Mapping[str, object], dialect: Dialect) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """Return the members without names that another name of the same parameter overrules, and those names."""
    sent = [name for name in dialect.precedence if members.get(name) is not None]
    overruled = tuple(name for name in sent[1:] if not is_same(members[name], members[sent[0]]))
    return {name: value for name, value in members.items() if name not in overruled}, overruled


def _without_overruled_constraints(values: dict[str, object], fields: Fields, dialect: Dialect) -> tuple[str, ...]:
    """Take out of the values what another constraint overrules in this dialect; return these names."""
    sent = {name for name, value in values.items() if value is not None}
    found = [loser for winner, loser in dialect.overruled_constraints if {winner, loser} <= sent]
    for loser in found:
        values[loser] = None
    return tuple(map(fields.spelled, found))
