"""Turns the bytes of a body into a JSON object, and that into a request, or says which parameter is wrong and why."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar

from serve_app.api.chat import CHAT_DEFAULTS, CHAT_PARAMETERS, ChatRequest
from serve_app.api.completion import CompletionRequest
from serve_app.api.contradictions import Sent, check_contradictions
from serve_app.api.dialects import ONLY_MODEL, UNION, Dialect
from serve_app.api.error_text import shown
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
    read_values,
)
from serve_app.core.errors import InvalidRequest, MalformedJson, UnsupportedParameter
from serve_app.core.prompt import Prompt

SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json_object(body: bytes, *, max_depth: int) -> dict[str, object]:
    """Parse strict JSON: UTF-8, finite numbers, no key twice, no lone surrogates, bounded depth.

    Raises InvalidRequest; MalformedJson where it is the syntax that is wrong.
    """
    text = _decode(body)
    value = _parse(text)
    if not isinstance(value, dict):
        raise InvalidRequest(f"The request body must be a JSON object; found {shown(value)}.")
    check_depth(value, max_depth)
    if SURROGATE_ESCAPE.search(text):
        _check_characters(value)
    return value


def _decode(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedJson(f"The request body must be JSON in UTF-8; byte {error.start} is not UTF-8.") from None


def _parse(text: str) -> object:
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_refuse_constant, object_pairs_hook=_unique_members)
    except json.JSONDecodeError as error:
        raise MalformedJson(
            f"The request body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}."
        ) from None
    except RecursionError:
        raise MalformedJson("The request body is nested too deeply.") from None
    except ValueError:  # Python refuses integers of more than 4300 digits
        raise MalformedJson("The request body contains an integer of thousands of digits.") from None


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise MalformedJson(f"The request body contains {literal[:40]}, which no finite number can hold.")
    return number


def _refuse_constant(literal: str) -> NoReturn:
    raise MalformedJson(f"The request body contains {literal}, which is not JSON; numbers must be finite.")


def _unique_members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InvalidRequest(f"The request body has the key {shown(twice)} more than once in one object.")
    return members


def check_depth(value: object, max_depth: int) -> None:
    """Raise InvalidRequest if the value is nested more than that."""
    level: list[Any] = [value] if isinstance(value, list | dict) else []
    for _ in range(max_depth):
        children = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in children if isinstance(child, list | dict)]
        if not level:
            return
    raise InvalidRequest(f"The request body is nested more than {max_depth} levels deep.")


def _check_characters(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            "The request body contains half of a surrogate pair (\\ud800 to \\udfff), which is no character."
        ) from None


def read_members(
    body: bytes, table: Mapping[str, Parameter], limits: WireLimits, *, path: str, required: str | None = None
) -> dict[str, Any]:
    """The members that are not null, in their forms.

    required: a member that must be there

    Raises InvalidRequest, and UnsupportedParameter for a name that the table lacks.
    """
    terms = Terms(limits=limits, dialect=UNION)
    values = {}
    for name, sent in read_json_object(body, max_depth=limits.max_depth).items():
        if sent is None:
            continue
        if name not in table:
            raise UnsupportedParameter.refusing(
                name[:100], must=f"be one of the parameters of {path}: {', '.join(table)}", found="none of that name"
            )
        values[name] = table[name].form.read(Value(name=name, sent=sent, terms=terms))
    if required is not None and required not in values:
        raise InvalidRequest.refusing(required, must=f"be {table[required].form.words(terms)}", found="nothing")
    return values


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
    table={**PARAMETERS, "response_fields": Carried(RESPONSE_FIELDS)},
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
    values = read_values(fields, table, terms)
    if "prompt" in values:
        values["prompts"] = _prompts(values, fields, terms)
    top_logprobs = values.pop("top_logprobs", None)
    if fields.values.get("logprobs") is True and top_logprobs is not None:
        values["logprobs"] = top_logprobs
    if isinstance(values.get("logprobs"), bool):
        values["logprobs"] = 0 if values["logprobs"] else None
    if "stream_options" in values:
        members: Any = values["stream_options"]
        refuses = terms.dialect.refuses_unknown
        options = read_fields(members, STREAM_OPTIONS, within="stream_options.", refuses_unknown=refuses)
        fields.ignored += options.ignored
        values["stream_options"] = StreamOptions.model_validate(read_values(options, STREAM_OPTIONS, terms))
    if "mirostat_target" in fields.names:
        values.setdefault("mirostat", 2)
    return values


def _prompts(values: dict[str, object], fields: Fields, terms: Terms) -> tuple[Prompt, ...]:
    """Take the prompts out of the values and put the images that came beside them into their places."""
    prompts: Any = values.pop("prompt")
    images: Any = values.get("images", ())
    return illustrated(prompts, images, name=fields.spelled("images"), limits=terms.limits)


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
