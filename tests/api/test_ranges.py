"""One statement per range: what the description promises is taken, one beyond is refused in the listing's words."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from serve_app.api.dialects import DIALECTS, UNION, BestOf, Dialect
from serve_app.api.limits import WireLimits
from serve_app.api.listings import dialects_body
from serve_app.api.openapi import openapi_document
from serve_app.api.parameters import PARAMETERS, Inert, NotYet, Renamed
from serve_app.core.errors import InvalidRequest
from tests.parsing import parse_completion

LIMITS = WireLimits(
    max_prompts=7, max_prompt_chars=90, max_prompt_ids=11, max_n=9, max_logprobs=13, max_stop_strings=6,
    max_stop_chars=40, max_stop_token_ids=12, max_logit_bias=14, max_model_chars=80, max_constraint_chars=9000,
)  # fmt: skip
OF_FILES = {"images"}
"""What is a file, and has a place in the prompt for each, as in `tests/api/test_images.py`."""
NAMES = sorted(
    name for name, each in PARAMETERS.items() if not isinstance(each, NotYet | Inert) and name not in OF_FILES
)
COMPANIONS: dict[str, dict[str, object]] = {
    "best_of": {"n": 1},
    "min_tokens": {"max_tokens": 2**31 - 1},
    "mirostat_target": {"mirostat": 1},
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
}
OF_NO_USE: dict[str, object] = {"stream_options": "value", "json_schema": 5, "guided_json": 5}
"""Where any object is of some use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Values at one end of a range. told: what a refusal says of it"""

    taken: object
    refused: object
    told: str


@cache
def described(name: str) -> dict[str, dict[str, Any]]:
    """The schemas of all parameters, in the dialect of that name."""
    document = json.loads(json.dumps(openapi_document(LIMITS, DIALECTS[name])))
    return document["components"]["schemas"]["CompletionRequest"]["properties"]


@cache
def listed() -> dict[str, dict[str, Any]]:
    """What is listed of all parameters, by dialect."""
    listing = dialects_body(default=UNION, of_models={}, limits=LIMITS)["data"]
    assert isinstance(listing, list)
    return {each["name"]: each["parameters"] for each in listing}


def probes(schema: dict[str, Any]) -> Iterator[Probe]:
    """Both ends of every range in a schema, those of its alternatives and of a list's elements included."""
    for alternative in schema.get("anyOf", [schema]):
        if "anyOf" in alternative:
            yield from probes(alternative)
            continue
        match alternative.get("type"):
            case "integer":
                yield from integers(alternative)
            case "number":
                yield from numbers(alternative)
            case "string" if "maxLength" in alternative:
                yield length(alternative["maxLength"], is_json="contentMediaType" in alternative)
            case "array" if "items" in alternative:
                yield from lists(alternative)
            case "object" if "maxProperties" in alternative:
                most = alternative["maxProperties"]
                members = {str(at): 1 for at in range(most + 1)}
                yield Probe(taken=dict(list(members.items())[:-1]), refused=members, told=str(most))


def integers(schema: dict[str, Any]) -> Iterator[Probe]:
    low, high = schema["minimum"], schema["maximum"]
    told = f"an integer from {low} to {high}"
    yield Probe(taken=low, refused=low - 1, told=told)
    yield Probe(taken=high, refused=high + 1, told=told)


def numbers(schema: dict[str, Any]) -> Iterator[Probe]:
    high = schema["maximum"]
    if "exclusiveMinimum" in schema:
        above = schema["exclusiveMinimum"]
        told = f"a number above {above} and at most {high}"
        yield Probe(taken=math.nextafter(above, math.inf), refused=above, told=told)
    elif "minimum" in schema:
        low = schema["minimum"]
        told = f"a number from {low} to {high}"
        yield Probe(taken=low, refused=math.nextafter(low, -math.inf), told=told)
    else:
        told = f"a number of at most {high}"
        assert parse_completion(body("top_n_sigma", {"top_n_sigma": -1e308})).top_n_sigma == -1e308
    yield Probe(taken=high, refused=math.nextafter(high, math.inf), told=told)


def length(most: int, *, is_json: bool) -> Probe:
    pad, start = (" ", "{}") if is_json else ("x", "")
    told = f"at most {most} characters"
    return Probe(taken=start.ljust(most, pad), refused=start.ljust(most + 1, pad), told=told)


def lists(schema: dict[str, Any]) -> Iterator[Probe]:
    items = schema["items"]
    if "maxItems" in schema:
        made = [example(items, at) for at in range(schema["maxItems"] + 1)]
        yield Probe(taken=made[:-1], refused=made, told=str(schema["maxItems"]))
    for at_one_end in probes(items):
        if isinstance(at_one_end.taken, int | str):
            yield Probe(taken=[at_one_end.taken], refused=[at_one_end.refused], told=element_words(at_one_end))


def element_words(probe: Probe) -> str:
    return "a token id" if isinstance(probe.taken, int) else probe.told


def example(schema: dict[str, Any], at: int) -> object:
    """The smallest value that a schema takes, another one for each place."""
    schema = schema.get("anyOf", [schema])[0]
    match schema.get("type"):
        case "integer":
            return at
        case "string":
            return f"x{at}"
        case "object" if "function" in schema["properties"]:
            return {"type": "function", "function": {"name": f"f{at}"}}
        case "object":
            return {"id": at, "scale": 0}
        case "array":
            return [at, 1]
        case kind:
            raise AssertionError(kind)


def body(name: str, members: dict[str, object], dialect: Dialect = UNION) -> bytes:
    companions = COMPANIONS.get(name, {})
    if name == "best_of" and dialect.best_of is BestOf.RETURNED:
        companions = {"n": LIMITS.max_n}
    if name == "lora_path" and isinstance(members[name], list):
        companions = {"prompt": ["a"] * min(len(members[name]), LIMITS.max_prompts)}
    return json.dumps({"model": "tiny", "prompt": "Hello", **companions, **members}).encode()


def parse(dialect: Dialect, name: str, value: object) -> object:
    return parse_completion(body(name, {name: value}, dialect), LIMITS, choose_dialect=lambda model: dialect)


@pytest.mark.parametrize("name", NAMES)
def test_both_ends_of_a_described_range_are_taken_and_one_beyond_is_refused_in_words(name: str) -> None:
    for dialect in DIALECTS.values():
        check_ends(dialect, name)


def check_ends(dialect: Dialect, name: str) -> None:
    disposition = PARAMETERS[name]
    absent = disposition.absent if isinstance(disposition, Renamed) else ()
    for probe in probes(described(dialect.name)[name]):
        parse(dialect, name, probe.taken)
        with pytest.raises(InvalidRequest) as caught:
            parse(dialect, name, probe.refused if probe.refused not in absent else -5e-324)
        assert probe.told in caught.value.message, f"{name}: {caught.value.message}"
        assert caught.value.param is not None
        assert caught.value.param.startswith(name)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "prompt"])
def test_the_listing_the_description_and_the_refusal_say_the_same(name: str) -> None:
    for dialect in DIALECTS.values():
        check_words(dialect, name)


def check_words(dialect: Dialect, name: str) -> None:
    disposition = PARAMETERS[name]
    with pytest.raises(InvalidRequest) as caught:
        parse(dialect, name, OF_NO_USE.get(name, {"no": [], "such": "value"}))
    if name == "logit_bias":  # an object is one of its forms, so that it is a member which is refused
        return
    said = caught.value.message.removeprefix(f'"{name}" must be ').partition("; found ")[0]
    if isinstance(disposition, Renamed):
        if disposition.form is None:
            assert said == listed()[dialect.name][disposition.to]["allowed"]
        return
    assert said == listed()[dialect.name][name]["allowed"]
    if name != "user":
        assert f"Must be {said}." in described(dialect.name)[name]["description"]


def test_most_parameters_have_a_range_that_is_probed() -> None:
    ranged = {name for name, schema in described("union").items() if list(probes(schema))}
    flags = {name for name in NAMES if "a boolean" in str(listed()["union"][name].get("allowed"))}
    unbounded = {
        "user",
        "context_length_exceeded_behavior",
        "samplers",
        "stream_options",
        "response_format",
        "tool_choice",
        "suffix_mode",
        "truncation_side",
        "structured_outputs",
        "prediction",
    }
    renamed_flags = {"include_stop_str_in_output", "return_tokens", "add_bos_token"}
    assert set(NAMES) - ranged == (flags - {"logprobs"}) | unbounded | renamed_flags
