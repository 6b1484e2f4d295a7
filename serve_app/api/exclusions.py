"""Parameters that exclude each other, as schemas of the bodies that are refused for it; `contradictions` refuses them.

What a schema cannot say (that two numbers agree, or that one is below another) is said in docs/contract.md alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, product

from serve_app.api.contradictions import CONSTRAINTS
from serve_app.api.dialects.dialect import BestOf
from serve_app.api.dispositions import Disposition, Renamed
from serve_app.api.forms.form import Schema, Terms
from serve_app.api.forms.shared import FLAG
from serve_app.api.forms.structured import KINDS
from serve_app.api.openapi_schemas import NOTHING
from serve_app.api.parameters import PARAMETERS, form_of

NEUTRAL: Schema = {"enum": [None, "", [], False]}
"""Of a source of any kind."""
TRUE: Schema = {"const": True}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
SEVERAL: Schema = {"type": "integer", "minimum": 2}
WITHOUT_LOGPROBS: Mapping[str, Schema] = {"logprobs": {"enum": [None, False]}, "n_probs": {"enum": [None, 0, False]}}
NO_TOOLS: Schema = {"type": "array", "maxItems": 0}
OF_TOOLS: Schema = {"anyOf": [{"const": "required"}, {"type": "object"}]}
"""Choices that need something to choose from."""

DEMANDED: Schema = {
    "anyOf": [
        {"const": "required"},
        {"type": "object", "properties": {"type": {"const": "function"}}},
        {"type": "object", "properties": {"allowed_tools": {"properties": {"mode": {"const": "required"}}}}},
    ]
}
"""Of choices that make a text a call."""

SWITCHED_ON: Schema = {
    "type": "array",
    "contains": {"properties": {"scale": {"not": {"const": 0}}}, "required": ["scale"]},
}
ADAPTERS: Mapping[str, Schema] = {"lora": SWITCHED_ON, "lora_path": {"not": NOTHING}, "adapter": {"not": NOTHING}}
PREDICTIONS = ("prediction", "speculation")


def excluded(terms: Terms, table: Mapping[str, Disposition] = PARAMETERS) -> list[Schema]:
    """What no body of these parameters may match, each with a sentence that says why."""
    return [each for each in _excluded(terms, table) if table.keys() >= set(each["required"])]


def _excluded(terms: Terms, table: Mapping[str, Disposition]) -> list[Schema]:
    found = [
        _together("`echo_last` is a part of `echo`.", {"echo": TRUE, "echo_last": POSITIVE}),
        _together("`top_logprobs` counts `logprobs`.", {"top_logprobs": POSITIVE}, WITHOUT_LOGPROBS),
        _together("These are probabilities of `logprobs`.", {"post_sampling_probs": TRUE}, WITHOUT_LOGPROBS),
        _together("Both say what is expected.", {name: {"not": NOTHING} for name in PREDICTIONS}),
        *(_together("Both name adapters.", dict(pair)) for pair in combinations(ADAPTERS.items(), 2)),
        _together(
            "The target switches Mirostat on.",
            {"mirostat_target": {"type": "number", "exclusiveMinimum": 0}, "mirostat": {"const": 0}},
        ),
        _together("There is nothing to call.", {"tool_choice": OF_TOOLS}, {"tools": {"anyOf": [NOTHING, NO_TOOLS]}}),
        *_demanded_calls(),
        *_ranked_streams(terms),
        *_constraints(terms),
        *_flags_that_differ(table),
        *continued(),
    ]
    if terms.dialect.stream_options_need_stream:
        without_stream: Schema = {"stream": {"enum": [None, False]}}
        found.append(_together("They are of streams.", {"stream_options": {"type": "object"}}, without_stream))
    return found


def continued() -> list[Schema]:
    """Two that say how the prompt of a chat ends."""
    return [_together("One of them ends the prompt.", {"continue_final_message": TRUE, "add_generation_prompt": TRUE})]


def _together(why: str, sent: Mapping[str, Schema], besides: Mapping[str, Schema] | None = None) -> Schema:
    """Bodies with all of `sent`, in which what is there of `besides` is as described."""
    return {"description": why, "required": list(sent), "properties": {**sent, **(besides or {})}}


def _ranked_streams(terms: Terms) -> list[Schema]:
    why = "Completions are ranked when all have ended."
    if terms.dialect.best_of is BestOf.CANDIDATES:
        return [_together(why, {"stream": TRUE, "best_of": SEVERAL})]
    counts = ("n", *(name for name, each in PARAMETERS.items() if isinstance(each, Renamed) and each.to == "n"))
    return [_together(why, {"stream": TRUE, "best_of": {"type": "integer"}, name: SEVERAL}) for name in counts]


def _constraints(terms: Terms) -> list[Schema]:
    """Two that say what the text has to be, unless what is sent besides overrules one of them."""
    overruled = terms.dialect.overruled_constraints
    return [
        _together(
            "Each says what the text has to be.",
            {name: {"not": _free(name)} for name in (one, other)},
            {name: _free(name) for winner, loser in overruled if loser in pair for name in _spelled(winner)},
        )
        for pair in combinations(CONSTRAINTS, 2)
        if pair not in overruled and pair[::-1] not in overruled
        for one, other in product(*map(_spelled, pair))
    ]


def _spelled(name: str) -> list[str]:
    """Every name of a parameter."""
    return [name, *(other for other, each in PARAMETERS.items() if isinstance(each, Renamed) and each.to == name)]


def _demanded_calls() -> list[Schema]:
    why = "A text that has to be a call is nothing else."
    names = [name for each in CONSTRAINTS for name in _spelled(each)]
    return [_together(why, {"tool_choice": DEMANDED, name: {"not": _free(name)}}) for name in names]


def _free(name: str) -> Schema:
    """Of values that leave the text free."""
    match name:
        case "response_format":
            text: Schema = {"type": "object", "required": ["type"], "properties": {"type": {"const": "text"}}}
            return {"anyOf": [NOTHING, text]}
        case "structured_outputs":
            return {"anyOf": [NOTHING, {"type": "object", "properties": dict.fromkeys(KINDS, NEUTRAL)}]}
        case _:
            return NEUTRAL


def _flags_that_differ(table: Mapping[str, Disposition]) -> list[Schema]:
    """Two names of one flag, of which one is true and the other false."""
    pairs = [
        (name, each.to) for name, each in table.items() if isinstance(each, Renamed) and form_of(name, table) is FLAG
    ]
    return [
        _together("Both are names of one parameter.", {one: TRUE, other: {"const": False}})
        for pair in pairs
        for one, other in (pair, pair[::-1])
    ]
