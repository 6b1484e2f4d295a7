"""Turns the bytes of a request into a `CompletionRequest`, or says which parameter is wrong and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from serve_app.api.bounds import bounds_of
from serve_app.api.completion import CompletionRequest, StreamOptions
from serve_app.api.contradictions import Sent, check_contradictions
from serve_app.api.dialects.dialect import Dialect
from serve_app.api.dialects.tables import UNION
from serve_app.api.fields import Fields, is_same, read_fields
from serve_app.api.json_body import read_json_object
from serve_app.api.limits import DEFAULT_LIMITS, WireLimits
from serve_app.api.parameters import PARAMETERS, STREAM_OPTIONS, Accepted, Carried, Disposition
from serve_app.api.prompts import parse_prompts
from serve_app.api.shown import shown
from serve_app.api.values import READERS, Value
from serve_app.api.wording import in_words
from serve_app.core.errors import InvalidRequest

REQUIRED = ("model", "prompt")
Model = TypeVar("Model", bound=BaseModel)
ChooseDialect = Callable[[object], Dialect]


def parse_completion(
    body: bytes, limits: WireLimits = DEFAULT_LIMITS, *, choose_dialect: ChooseDialect = lambda model: UNION
) -> CompletionRequest:
    """Read, check and complete a request with the defaults of its dialect.

    choose_dialect: from the `model` that was sent, whatever it is, to the dialect of this request

    Raises InvalidRequest (or UnsupportedParameter) whose `param` is the parameter as the client spelled it.
    """
    members = read_json_object(body, max_depth=limits.max_depth)
    return read_completion(members, limits, choose_dialect(members.get("model")))


def read_completion(members: Mapping[str, object], limits: WireLimits, dialect: Dialect) -> CompletionRequest:
    """The request that these members of a JSON object make. Raises as `parse_completion`."""
    reader = _Reader(limits, dialect)
    members, overruled = _without_overruled(members, dialect)
    fields = read_fields(_without_unused_tools(members), PARAMETERS, refuses_unknown=dialect.refuses_unknown)
    if dialect.default_model is not None:
        fields.values.setdefault("model", dialect.default_model)
    for name in REQUIRED:
        if name not in fields.values:
            raise InvalidRequest(f"`{name}` is required: {reader.allowed(name)}.", name)
    prompts = parse_prompts(fields.values["prompt"], limits)
    values = reader.values(fields, num_prompts=len(prompts))
    internal = {
        "prompts": prompts,
        "dialect": dialect,
        "max_tokens_name": fields.spelled("max_tokens"),
        "ignored_parameters": (*overruled, *fields.ignored),
        "max_total_tokens": limits.max_total_tokens,
    }
    request = reader.validated(CompletionRequest, {**dialect.defaults, **values, **internal}, fields, PARAMETERS)
    reader.check_bounds(request, fields)
    check_contradictions(Sent(request=request, values=fields.values, fields=fields, limits=limits))
    return request


def integral(value: object) -> object:
    """JSON has one kind of number: a whole one is an integer, however it is written."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without_overruled(members: Mapping[str, object], dialect: Dialect) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """The members without those names that another name of the same parameter overrules, and these names."""
    sent = [name for name in dialect.precedence if members.get(name) is not None]
    overruled = tuple(name for name in sent[1:] if not is_same(members[name], members[sent[0]]))
    return {name: value for name, value in members.items() if name not in overruled}, overruled


def _without_unused_tools(members: Mapping[str, object]) -> Mapping[str, object]:
    """The members without tools that are not to be used. Raises InvalidRequest for what are no tools."""
    if members.get("tool_choice") != "none" or members.get("tools") is None:
        return members
    tools = members["tools"]
    if not isinstance(tools, list):
        raise InvalidRequest(f"`tools` must be a list of functions; found {shown(tools)}.", "tools")
    for at, tool in enumerate(tools):
        if not (isinstance(tool, dict) and tool.get("type") == "function" and _is_function(tool.get("function"))):
            raise InvalidRequest(
                f'`tools[{at}]` must be an object of `type` "function" with a `function` that has a `name`; found'
                f" {shown(tool)}.",
                f"tools[{at}]",
            )
    return {name: value for name, value in members.items() if name != "tools"}


def _is_function(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


class _Reader:
    """Reads values within limits, as a dialect has them."""

    def __init__(self, limits: WireLimits, dialect: Dialect) -> None:
        self._limits = limits
        self._dialect = dialect
        self._bounds = bounds_of(limits, dialect)

    def allowed(self, name: str, table: Mapping[str, Disposition] = PARAMETERS) -> str:
        disposition = table[name]
        assert isinstance(disposition, Carried | Accepted), f"{name} has no description of its values"
        return in_words(name, disposition, self._limits, self._dialect)

    def values(self, fields: Fields, *, num_prompts: int) -> dict[str, object]:
        """What was sent, in the forms of `CompletionRequest`."""
        values = {
            name: integral(value) for name, value in fields.values.items() if name not in ("prompt", "top_logprobs")
        }
        for name in values.keys() & READERS.keys():
            values[name] = READERS[name](
                Value(
                    name=fields.spelled(name),
                    sent=values[name],
                    allowed=self.allowed(name),
                    limits=self._limits,
                    num_prompts=num_prompts,
                )
            )
        if "stream_options" in values:
            values["stream_options"] = self._stream_options(values["stream_options"], fields)
        if fields.values.get("logprobs") is True and "top_logprobs" in fields.values:
            values["logprobs"] = self._top_logprobs(fields)
        if "mirostat_target" in fields.names:
            values.setdefault("mirostat", 2)
        return values

    def validated(
        self, model: type[Model], values: Mapping[str, object], fields: Fields, table: Mapping[str, Disposition]
    ) -> Model:
        try:
            return model.model_validate(values)
        except ValidationError as error:
            name = str(error.errors(include_url=False, include_context=False)[0]["loc"][0])
            raise self._not_allowed(name, fields, table) from None

    def check_bounds(self, request: CompletionRequest, fields: Fields) -> None:
        """Hold what configuration and dialect bound against it; the model knows only what neither changes."""
        counts_logprobs = "top_logprobs" if "top_logprobs" in fields.values else "logprobs"
        for name, size in (
            ("model", len(request.model)),
            ("n", request.n),
            ("stop", len(request.stop)),
            ("best_of", request.best_of or 0),
            ("top_k", request.top_k),
            (counts_logprobs, request.logprobs or 0),
        ):
            bound = self._bounds.of(name)
            if bound is not None and size > bound:
                raise self._not_allowed(name, fields, PARAMETERS)
        if "max_tokens" in fields.values and not self._dialect.takes_max_tokens(request.max_tokens):
            raise self._not_allowed("max_tokens", fields, PARAMETERS)

    def _top_logprobs(self, fields: Fields) -> object:
        count = integral(fields.values["top_logprobs"])
        if type(count) is not int or count < 0:
            raise self._not_allowed("top_logprobs", fields, PARAMETERS)
        return count

    def _stream_options(self, value: object, fields: Fields) -> StreamOptions:
        if not isinstance(value, dict):
            raise InvalidRequest(
                f"`stream_options` must be {self.allowed('stream_options')}; found {shown(value)}.", "stream_options"
            )
        options = read_fields(
            value, STREAM_OPTIONS, within="stream_options.", refuses_unknown=self._dialect.refuses_unknown
        )
        fields.ignored += options.ignored
        return self.validated(StreamOptions, options.values, options, STREAM_OPTIONS)

    def _not_allowed(self, name: str, fields: Fields, table: Mapping[str, Disposition]) -> InvalidRequest:
        spelled = fields.spelled(name)
        found = shown(fields.values[name])
        return InvalidRequest(f"`{spelled}` must be {self.allowed(name, table)}; found {found}.", spelled)
