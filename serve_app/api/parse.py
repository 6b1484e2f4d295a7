"""Turns the bytes of a request into a `CompletionRequest`, or says which parameter is wrong and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from serve_app.api.completion import CompletionRequest, StreamOptions
from serve_app.api.fields import Fields, is_same, read_fields
from serve_app.api.json_body import read_json_object
from serve_app.api.limits import DEFAULT_LIMITS, WireLimits
from serve_app.api.parameters import PARAMETERS, STREAM_OPTIONS, Accepted, Carried, Disposition
from serve_app.api.prompts import parse_prompts
from serve_app.api.shown import shown
from serve_app.core.errors import InvalidRequest

REQUIRED = ("model", "prompt")
Model = TypeVar("Model", bound=BaseModel)


def parse_completion(body: bytes, limits: WireLimits = DEFAULT_LIMITS) -> CompletionRequest:
    """Read, check and complete a request with defaults.

    Raises InvalidRequest (or UnsupportedParameter) whose `param` is the parameter as the client spelled it.
    """
    members = read_json_object(body, max_depth=limits.max_depth)
    fields = read_fields(members, PARAMETERS)
    for name in REQUIRED:
        if name not in fields.values:
            raise InvalidRequest(f"`{name}` is required: {_allowed(name, PARAMETERS, limits)}.", name)
    values = dict(fields.values)
    prompts = parse_prompts(values.pop("prompt"), limits)
    _replace(values, "stop", lambda value: _parse_stop(value, limits))
    _replace(values, "lora_path", lambda value: _parse_lora_path(value, len(prompts)))
    _replace(values, "stream_options", lambda value: _parse_stream_options(value, limits))
    _replace(values, "top_k", lambda value: 0 if is_same(value, -1) else value)
    _replace(values, "seed", lambda value: None if is_same(value, -1) else value)
    request = _validate(CompletionRequest, {**values, "prompts": prompts}, fields, PARAMETERS, limits)
    _check_bounds(request, fields, limits)
    _check_amount(request, fields, limits)
    _check_best_of(members, request)
    return request


def _replace(values: dict[str, object], name: str, parse: Callable[[object], object]) -> None:
    if name in values:
        values[name] = parse(values[name])


def _validate(
    model: type[Model],
    values: Mapping[str, object],
    fields: Fields,
    table: Mapping[str, Disposition],
    limits: WireLimits,
) -> Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        name = str(error.errors(include_url=False, include_context=False)[0]["loc"][0])
        raise _not_allowed(name, values[name], fields, table, limits) from None


def _not_allowed(
    name: str, value: object, fields: Fields, table: Mapping[str, Disposition], limits: WireLimits
) -> InvalidRequest:
    spelled = fields.spelled(name)
    return InvalidRequest(f"`{spelled}` must be {_allowed(name, table, limits)}; found {shown(value)}.", spelled)


def _allowed(name: str, table: Mapping[str, Disposition], limits: WireLimits) -> str:
    disposition = table[name]
    assert isinstance(disposition, Carried | Accepted), f"{name} has no description of its values"
    return disposition.allowed.format(limits=limits)


def _parse_stop(value: object, limits: WireLimits) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    allowed = _allowed("stop", PARAMETERS, limits)
    if not isinstance(strings, list):
        raise InvalidRequest(f"`stop` must be {allowed}; found {shown(value)}.", "stop")
    if len(strings) > limits.max_stop_strings:
        raise InvalidRequest(f"`stop` must be {allowed}; found {len(strings)} strings.", "stop")
    for at, string in enumerate(strings):
        path = f"stop[{at}]" if isinstance(value, list) else "stop"
        if not isinstance(string, str):
            raise InvalidRequest(f"`{path}` must be a string; found {shown(string)}.", path)
        if len(string) > limits.max_stop_chars:
            raise InvalidRequest(
                f"`{path}` must be at most {limits.max_stop_chars} characters; found {len(string)}.", path
            )
    return tuple(dict.fromkeys(string for string in strings if string))


def _parse_lora_path(value: object, num_prompts: int) -> str | tuple[str | None, ...]:
    if isinstance(value, str):
        if not value:
            raise InvalidRequest('`lora_path` must name an adapter; found "".', "lora_path")
        return value
    if not isinstance(value, list):
        raise InvalidRequest(
            "`lora_path` must be the name of an adapter, or a list with one name or null for each prompt;"
            f" found {shown(value)}.",
            "lora_path",
        )
    if len(value) != num_prompts:
        raise InvalidRequest(
            f"`lora_path` must have one element for each prompt, {num_prompts} in all; found {len(value)}.",
            "lora_path",
        )
    for at, name in enumerate(value):
        if name is not None and not (isinstance(name, str) and name):
            path = f"lora_path[{at}]"
            raise InvalidRequest(f"`{path}` must be the name of an adapter or null; found {shown(name)}.", path)
    return tuple(value)


def _parse_stream_options(value: object, limits: WireLimits) -> StreamOptions:
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"`stream_options` must be {_allowed('stream_options', PARAMETERS, limits)}; found {shown(value)}.",
            "stream_options",
        )
    fields = read_fields(value, STREAM_OPTIONS, within="stream_options.")
    return _validate(StreamOptions, fields.values, fields, STREAM_OPTIONS, limits)


def _check_bounds(request: CompletionRequest, fields: Fields, limits: WireLimits) -> None:
    """Hold what the configuration bounds against it; the model knows only what no configuration changes."""
    for name, size, bound in (
        ("model", len(request.model), limits.max_model_chars),
        ("n", request.n, limits.max_n),
        ("logprobs", request.logprobs or 0, limits.max_logprobs),
    ):
        if size > bound:
            raise _not_allowed(name, getattr(request, name), fields, PARAMETERS, limits)


def _check_amount(request: CompletionRequest, fields: Fields, limits: WireLimits) -> None:
    """Bound the product of prompts, `n` and `max_tokens`, before anything of that size exists."""
    num_prompts, spelled_n = len(request.prompts), fields.spelled("n")
    if request.num_choices > limits.max_choices:
        raise InvalidRequest(
            f"The number of prompts times `{spelled_n}` must be at most {limits.max_choices};"
            f" found {num_prompts} × {request.n} = {request.num_choices}.",
            spelled_n,
        )
    if request.num_choices * request.max_tokens > limits.max_total_tokens:
        spelled = fields.spelled("max_tokens")
        raise InvalidRequest(
            f"The number of prompts times `{spelled_n}` times `{spelled}` must be at most"
            f" {limits.max_total_tokens}; found {num_prompts} × {request.n} × {request.max_tokens}.",
            spelled,
        )


def _check_best_of(members: Mapping[str, object], request: CompletionRequest) -> None:
    """Refuse a neutral `best_of` that `n` makes a contradiction."""
    if members.get("best_of") is not None and request.n > 1:
        raise InvalidRequest(
            f"`best_of` must be at least `n`, which is {request.n}; found {shown(members['best_of'])}.",
            "best_of",
        )
