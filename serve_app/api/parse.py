"""Turns the bytes of a request into a `CompletionRequest`, or says which parameter is wrong and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from serve_app.api.completion import CompletionRequest, StreamOptions
from serve_app.api.contradictions import Sent, check_contradictions
from serve_app.api.dialects.dialect import Dialect
from serve_app.api.dialects.tables import UNION
from serve_app.api.fields import Fields, read_fields
from serve_app.api.json_body import read_json_object
from serve_app.api.limits import DEFAULT_LIMITS, WireLimits
from serve_app.api.parameters import PARAMETERS, STREAM_OPTIONS, Accepted, Carried, Disposition
from serve_app.api.prompts import parse_prompts
from serve_app.api.shown import shown
from serve_app.api.values import READERS, Value
from serve_app.api.wording import in_words, limits_within, max_stop_strings
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
    reader = _Reader(limits_within(limits, dialect), dialect)
    fields = read_fields(members, PARAMETERS)
    for name in REQUIRED:
        if name not in fields.values:
            raise InvalidRequest(f"`{name}` is required: {reader.allowed(name)}.", name)
    prompts = parse_prompts(fields.values["prompt"], reader.limits)
    values = reader.values(fields, num_prompts=len(prompts))
    completed = {**dialect.defaults, **values, "prompts": prompts, "dialect": dialect}
    completed["max_tokens_name"] = fields.spelled("max_tokens")
    request = reader.validated(CompletionRequest, completed, fields, PARAMETERS)
    reader.check_bounds(request, fields)
    check_contradictions(Sent(request=request, values=fields.values, fields=fields, limits=reader.limits))
    return request


class _Reader:
    """Reads values within limits, as a dialect has them."""

    def __init__(self, limits: WireLimits, dialect: Dialect) -> None:
        self.limits = limits
        self._dialect = dialect
        self._max_stop_strings = max_stop_strings(limits, dialect)

    def allowed(self, name: str, table: Mapping[str, Disposition] = PARAMETERS) -> str:
        disposition = table[name]
        assert isinstance(disposition, Carried | Accepted), f"{name} has no description of its values"
        return in_words(disposition, self.limits, self._dialect)

    def values(self, fields: Fields, *, num_prompts: int) -> dict[str, object]:
        """What was sent, in the forms of `CompletionRequest`."""
        values = {name: value for name, value in fields.values.items() if name not in ("prompt", "top_logprobs")}
        for name in values.keys() & READERS.keys():
            values[name] = READERS[name](
                Value(
                    name=fields.spelled(name),
                    sent=values[name],
                    allowed=self.allowed(name),
                    limits=self.limits,
                    num_prompts=num_prompts,
                )
            )
        if "stream_options" in values:
            values["stream_options"] = self._stream_options(values["stream_options"])
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
        for name, size, bound in (
            ("model", len(request.model), self.limits.max_model_chars),
            ("n", request.n, min(self.limits.max_n, self._dialect.max_n)),
            ("stop", len(request.stop), self._max_stop_strings),
            ("best_of", request.best_of or 0, self.limits.max_n),
            ("top_k", request.top_k, self._dialect.max_top_k),
            ("top_logprobs" if "top_logprobs" in fields.values else "logprobs", request.logprobs or 0,
             self.limits.max_logprobs),
        ):  # fmt: skip
            if size > bound:
                raise self._not_allowed(name, fields, PARAMETERS)
        if "max_tokens" in fields.values and not self._dialect.takes_max_tokens(request.max_tokens):
            raise self._not_allowed("max_tokens", fields, PARAMETERS)

    def _top_logprobs(self, fields: Fields) -> object:
        count = fields.values["top_logprobs"]
        if type(count) is not int or count < 0:
            raise self._not_allowed("top_logprobs", fields, PARAMETERS)
        return count

    def _stream_options(self, value: object) -> StreamOptions:
        if not isinstance(value, dict):
            raise InvalidRequest(
                f"`stream_options` must be {self.allowed('stream_options')}; found {shown(value)}.", "stream_options"
            )
        fields = read_fields(value, STREAM_OPTIONS, within="stream_options.")
        return self.validated(StreamOptions, fields.values, fields, STREAM_OPTIONS)

    def _not_allowed(self, name: str, fields: Fields, table: Mapping[str, Disposition]) -> InvalidRequest:
        spelled = fields.spelled(name)
        found = shown(fields.values[name])
        return InvalidRequest(f"`{spelled}` must be {self.allowed(name, table)}; found {found}.", spelled)
