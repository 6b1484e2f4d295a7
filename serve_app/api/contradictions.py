"""What single values do not show: parameters that contradict each other, and amounts that multiply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations, product

from serve_app.api.chat import ChatRequest, check_continuation
from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import BestOf
from serve_app.api.error_text import shown
from serve_app.api.forms.constraints import KINDS
from serve_app.api.forms.form import FLAG, Terms
from serve_app.api.forms.schema import NOTHING, POSITIVE, Schema
from serve_app.api.groups import Held
from serve_app.api.limits import WireLimits
from serve_app.api.parameters import PARAMETERS, Disposition, Fields, Renamed, form_of
from serve_app.core.errors import InvalidRequest

CONSTRAINTS = tuple(Held.model_fields)
PREDICTIONS = ("prediction", "speculation")
ALONE = frozenset(("lark", "llguidance", "structural_tag"))
"""Kinds of constraints that stand beside no strict tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A request beside what was sent of it."""

    request: CompletionRequest
    fields: Fields
    limits: WireLimits

    @property
    def values(self) -> Mapping[str, object]:
        return self.fields.values

    def spelled(self, name: str) -> str:
        return self.fields.spelled(name)

    def refused(self, name: str, must: str, found: object) -> InvalidRequest:
        return InvalidRequest.refusing(self.spelled(name), must=must, found=shown(found))


def check_contradictions(sent: Sent) -> None:
    """Raise InvalidRequest, which names each parameter of a contradiction, if there is one."""
    for check in CHECKS:
        check(sent)


def _check_best_of(sent: Sent) -> None:
    request, best_of = sent.request, sent.request.best_of
    if best_of is None:
        return
    n = sent.spelled("n")
    if request.dialect.best_of is BestOf.CANDIDATES and best_of < request.n:
        raise sent.refused("best_of", f'be at least "{n}", which is {request.n}', best_of)
    if request.dialect.best_of is BestOf.RETURNED and best_of > request.n:
        most = f'be at most "{n}", which is {request.n}, in the dialect {request.dialect.name}'
        raise sent.refused("best_of", most, best_of)
    if request.stream and request.is_ranked:
        alone = 'be absent or 1 where "stream" is true, as completions are ranked when all have ended'
        raise sent.refused("best_of", alone, best_of)


def _check_min_tokens(sent: Sent) -> None:
    request = sent.request
    if request.max_tokens >= 0 and request.min_tokens > request.max_tokens:
        most = f'be at most "{sent.spelled("max_tokens")}", which is {request.max_tokens}'
        raise sent.refused("min_tokens", most, request.min_tokens)


def _check_logprobs(sent: Sent) -> None:
    """`top_logprobs` is the count beside `logprobs: true`; beside a count it must be the same one."""
    if "top_logprobs" not in sent.values:
        return
    top, logprobs = sent.values["top_logprobs"], sent.values.get("logprobs")
    if top == 0 and logprobs in (None, False):  # nothing is wanted
        return
    if logprobs is True or (not isinstance(logprobs, bool) and logprobs == top):
        return
    name = sent.spelled("logprobs")
    beside = "nothing" if logprobs is None else shown(logprobs)
    raise InvalidRequest.refusing(
        sent.spelled("top_logprobs"),
        must=f'stand beside "{name}", which is true or the same count',
        found=f"{shown(top)} beside {beside}",
    )


def _check_echo(sent: Sent) -> None:
    if sent.request.echo and sent.request.echo_last:
        raise sent.refused("echo_last", 'be absent or 0 where "echo" is true', sent.request.echo_last)


def _check_post_sampling(sent: Sent) -> None:
    if sent.request.post_sampling_probs and sent.request.logprobs is None:
        which = f'be absent or false without "{sent.spelled("logprobs")}", as it says which are returned'
        raise sent.refused("post_sampling_probs", which, True)


def _check_alone(sent: Sent, values: Mapping[str, object], why: str = "") -> None:
    """Refuse a second of these parameters. values: None is no value"""
    found = [name for name, value in values.items() if value is not None]
    if len(found) > 1:
        must = f'be absent beside "{sent.spelled(found[0])}"{why}'
        raise sent.refused(found[1], must, sent.values[found[1]])


def _check_adapters(sent: Sent) -> None:
    request = sent.request
    named = {"lora_path": request.lora_path, "lora": request.scales or None, "adapter": request.adapter}
    _check_alone(sent, named, ", as both name adapters")


def _check_adapter_of_each_prompt(sent: Sent) -> None:
    names, num_prompts = sent.request.lora_path, len(sent.request.prompts)
    if isinstance(names, tuple) and len(names) != num_prompts:
        raise sent.refused("lora_path", f"have one element for each prompt, {num_prompts} in all", len(names))


def _check_constraints(sent: Sent) -> None:
    sources = {name: getattr(sent.request, name) for name in CONSTRAINTS}
    _check_alone(sent, sources, ", as each says what the text has to be")


def _check_tools(sent: Sent) -> None:
    """Refuse a required call without its tools, or beside a constraint on the text."""
    request, choice = sent.request, sent.request.tool_choice
    if choice is None or choice.mode == "none":
        return
    found = sent.values["tool_choice"]
    if choice.names is None and choice.mode == "auto":
        return
    if not request.tools:
        raise sent.refused("tool_choice", 'be "none" or "auto" without "tools"', found)
    names = {tool.name for tool in request.tools}
    for name in choice.names or ():
        if name not in names:
            raise sent.refused("tool_choice", 'name functions of "tools"', name)
    constraint = request.constraint
    if choice.mode == "required" and constraint is not None:
        alone = f'be "none" or "auto" beside "{constraint.name}", as a call is nothing else'
        raise sent.refused("tool_choice", alone, found)


def _check_strict_tools(sent: Sent) -> None:
    """A text may be a call or what a constraint says, but not of a language that cannot be part of another grammar."""
    constraint = sent.request.constraint
    if constraint is None or constraint.kind not in ALONE:
        return
    for tool in sent.request.tool_use.usable:
        if tool.is_strict:
            must = f'be absent or false beside "{constraint.name}", which holds the text to a grammar of its own'
            path = f"{sent.spelled('tools')}[{tool.at}].function.strict"
            raise InvalidRequest.refusing(path, must=must, found="true")


def _check_mirostat(sent: Sent) -> None:
    """Fireworks' name of the target switches Mirostat on, which `mirostat: 0` contradicts."""
    if "mirostat_target" in sent.fields.names and sent.values.get("mirostat") == 0:
        off = 'be absent or 0 where "mirostat" is 0, as it switches Mirostat on'
        raise sent.refused("mirostat_tau", off, sent.values["mirostat_tau"])


def _check_stream_options(sent: Sent) -> None:
    request = sent.request
    if request.dialect.stream_options_need_stream and "stream_options" in sent.values and not request.stream:
        alone = 'be absent unless "stream" is true'
        raise sent.refused("stream_options", alone, sent.values["stream_options"])


def _check_continuation(sent: Sent) -> None:
    if isinstance(sent.request, ChatRequest):
        check_continuation({**sent.values, "messages": sent.request.messages})


def _check_prompts(sent: Sent) -> None:
    if sent.request.dialect.takes_mixed_prompts:
        return
    for index, prompt in enumerate(sent.request.prompts):
        if {str, tuple} <= set(map(type, prompt.parts)):
            path = "prompt" if len(sent.request.prompts) == 1 else f"prompt[{index}]"
            raise InvalidRequest.refusing(
                path, must=f"be text or token ids in the dialect {sent.request.dialect.name}", found="both mixed"
            )


def _check_amount(sent: Sent) -> None:
    """Bound the number of completions, before anything of that size exists."""
    request, limits = sent.request, sent.limits
    each = request.num_candidates
    counts = [len(request.prompts), each]
    factors = "prompts"
    if request.listed:
        counts.insert(0, len(request.listed))
        factors = "models times prompts"
    counted = "n" if each == request.n else "best_of"
    if request.num_choices > limits.max_choices:
        raise InvalidRequest.refusing(
            sent.spelled(counted),
            must=f"be such that {factors} times it are at most {limits.max_choices}",
            found=f"{' × '.join(map(str, counts))} = {request.num_choices}",
        )


def _check_prediction(sent: Sent) -> None:
    """Refuse `speculation` beside `prediction`, as Fireworks does."""
    _check_alone(sent, {name: getattr(sent.request, name) for name in PREDICTIONS})


CHECKS: tuple[Callable[[Sent], None], ...] = (
    _check_best_of,
    _check_min_tokens,
    _check_logprobs,
    _check_echo,
    _check_adapters,
    _check_adapter_of_each_prompt,
    _check_post_sampling,
    _check_constraints,
    _check_tools,
    _check_strict_tools,
    _check_mirostat,
    _check_stream_options,
    _check_continuation,
    _check_prompts,
    _check_prediction,
    _check_amount,
)


NEUTRAL: Schema = {"enum": [None, "", [], False]}
"""Of a source of any kind."""
TRUE: Schema = {"const": True}
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
NAMING_ADAPTERS: Mapping[str, Schema] = {
    "lora": SWITCHED_ON,
    "lora_path": {"not": NOTHING},
    "adapter": {"not": NOTHING},
}


def excluded(terms: Terms, table: Mapping[str, Disposition] = PARAMETERS) -> list[Schema]:
    """Return schemas that no body of these parameters may match, each with a sentence that says why."""
    return [each for each in _excluded(terms, table) if table.keys() >= set(each["required"])]


def _excluded(terms: Terms, table: Mapping[str, Disposition]) -> list[Schema]:
    found = [
        _together("`echo_last` is a part of `echo`.", {"echo": TRUE, "echo_last": POSITIVE}),
        _together("`top_logprobs` counts `logprobs`.", {"top_logprobs": POSITIVE}, WITHOUT_LOGPROBS),
        _together("These are probabilities of `logprobs`.", {"post_sampling_probs": TRUE}, WITHOUT_LOGPROBS),
        _together("Both say what is expected.", {name: {"not": NOTHING} for name in PREDICTIONS}),
        *(_together("Both name adapters.", dict(pair)) for pair in combinations(NAMING_ADAPTERS.items(), 2)),
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
    """Return the schema of two parameters that both say how a chat's prompt ends."""
    return [_together("One of them ends the prompt.", {"continue_final_message": TRUE, "add_generation_prompt": TRUE})]


def _together(why: str, sent: Mapping[str, Schema], besides: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of bodies with all of `sent` whose members in `besides` are as described, if present."""
    return {"description": why, "required": list(sent), "properties": {**sent, **(besides or {})}}


def _ranked_streams(terms: Terms) -> list[Schema]:
    why = "Completions are ranked when all have ended."
    if terms.dialect.best_of is BestOf.CANDIDATES:
        return [_together(why, {"stream": TRUE, "best_of": SEVERAL})]
    return [_together(why, {"stream": TRUE, "best_of": {"type": "integer"}, name: SEVERAL}) for name in _spelled("n")]


def _constraints(terms: Terms) -> list[Schema]:
    """Return the pairs of constraints that contradict each other, unless the dialect lets one overrule the other."""
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
    """Return every name of a parameter."""
    return [name, *(other for other, each in PARAMETERS.items() if isinstance(each, Renamed) and each.to == name)]


def _demanded_calls() -> list[Schema]:
    why = "A text that has to be a call is nothing else."
    names = [name for each in CONSTRAINTS for name in _spelled(each)]
    return [_together(why, {"tool_choice": DEMANDED, name: {"not": _free(name)}}) for name in names]


def _free(name: str) -> Schema:
    """Return the schema of values that do not constrain the text."""
    match name:
        case "response_format":
            text: Schema = {"type": "object", "required": ["type"], "properties": {"type": {"const": "text"}}}
            return {"anyOf": [NOTHING, text]}
        case "structured_outputs":
            return {"anyOf": [NOTHING, {"type": "object", "properties": dict.fromkeys(KINDS, NEUTRAL)}]}
        case _:
            return NEUTRAL


def _flags_that_differ(table: Mapping[str, Disposition]) -> list[Schema]:
    """Return the schemas of two names of one flag with different values."""
    pairs = [
        (name, each.to) for name, each in table.items() if isinstance(each, Renamed) and form_of(name, table) is FLAG
    ]
    return [
        _together("Both are names of one parameter.", {one: TRUE, other: {"const": False}})
        for pair in pairs
        for one, other in (pair, pair[::-1])
    ]
