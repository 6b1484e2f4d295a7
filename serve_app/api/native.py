"""llama.cpp's own routes: settings under its names, /props, /lora-adapters, and the body of /infill."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import LLAMA_CPP, Dialect
from serve_app.api.error_text import nearest
from serve_app.api.forms.form import Parameter, Terms, Text, Value
from serve_app.api.forms.schema import Schema, array, nullable, record, string
from serve_app.api.groups import Sampling
from serve_app.api.limits import WireLimits
from serve_app.api.parameters import PARAMETERS
from serve_app.api.parse import NATIVE, Body, read_request
from serve_app.api.paths import Path
from serve_app.core.cards import ModelCard
from serve_app.core.errors import InvalidRequest, UnsupportedParameter
from serve_app.core.prompt import ExtraFile, Infill, Prompt

NOT_NATIVE = (
    "best_of", "prompt_logprobs", "request_id", "return_cached_tokens_details", "return_hidden_states",
    "return_routed_experts",
)  # fmt: skip
"""What llama.cpp's own shape has no place for."""
LISTS = ("dry_sequence_breakers", "stop")
OTHER_NAMES: Mapping[str, str] = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
SAME_NAMES = (
    *(n for n, f in Sampling.model_fields.items() if type(f.default) in (int, float) and n not in OTHER_NAMES.values()),
    *("max_tokens", "ignore_eos", "stream", "timings_per_token", "post_sampling_probs"),
)
"""Sampling that is a number, and others."""
WHERE_NONE: Mapping[str, tuple[str, int]] = {
    "seed": ("seed", -1),
    "repeat_last_n": ("repeat_last_n", -1),
    "n_probs": ("logprobs", 0),
    "mirostat": ("mirostat", 0),
}
"""Names with the parameter that each tells, and what stands where that has no value."""
MISSING = object()


def chosen_fields(result: Mapping[str, object], paths: Sequence[str]) -> dict[str, object]:
    """Return the fields of a result that were asked for, by path; missing ones are left out."""
    if not paths:
        return dict(result)
    found = {}
    for path in paths:
        value: object = result
        for name in path.split("/"):
            value = value.get(name, MISSING) if isinstance(value, Mapping) else MISSING
        if value is not MISSING:
            found[path] = value
    return found


def native_settings(request: CompletionRequest) -> dict[str, object]:
    """Return the settings that a request ran with."""
    values = request.model_dump()
    return {
        **{name: values[name] for name in SAME_NAMES},
        **{name: list(values[name]) for name in LISTS},
        **{name: values[parameter] for name, parameter in OTHER_NAMES.items()},
        **{
            name: none if values[parameter] is None else values[parameter]
            for name, (parameter, none) in WHERE_NONE.items()
        },
        "samplers": list(request.samplers_in_order),
        "n_keep": 0,
        "n_discard": 0,
        "grammar": request.grammar.source if request.grammar is not None and request.grammar.kind == "gbnf" else "",
        "logit_bias": [{"token": key, "bias": False if math.isinf(bias) else bias} for key, bias in request.logit_bias],
        "lora": [{"id": number, "scale": scale} for number, scale in request.lora],
    }


UNSAID = CompletionRequest.model_validate({"model": "", "prompts": (), "dialect": LLAMA_CPP, **LLAMA_CPP.defaults})
"""A request that sends no settings."""


def props_body(card: ModelCard) -> dict[str, object]:
    """Return what llama.cpp tells of a server's model. POST cannot change any of it."""
    return {
        "default_generation_settings": {"n_ctx": card.max_model_len, "params": native_settings(UNSAID)},
        "model_alias": card.name,
        "model_path": card.root,
        "n_ctx": card.max_model_len,
        "n_vocab": card.vocab_size,
        "modalities": {"vision": card.images is not None and card.images.takes_images, "audio": False},
        "chat_template": card.chat_template,
        "is_sleeping": False,
    }


def adapters_body(card: ModelCard) -> list[dict[str, object]]:
    """Return the adapters that `lora` refers to by number. No request gets one that it does not name."""
    return [
        {"id": number, "path": adapter.root or adapter.name, "scale": 0.0, "name": f"{card.name}:{adapter.name}"}
        for number, adapter in enumerate(card.usable_adapters)
    ]


FILE_MEMBERS = {"text", "filename"}
MAX_NAME_CHARS = 64
UNNAMED = "tmp"
"""What llama.cpp calls a file without a name."""


class ExtraFiles:
    """A list of objects with a text and, maybe, a name; together no longer than a prompt may be."""

    def words(self, terms: Terms) -> str:
        limits = terms.limits
        return (
            f'a list of at most {limits.max_extra_files} objects {{"filename": string, "text": string}},'
            f" of at most {limits.max_prompt_chars} characters together"
        )

    def schema(self, terms: Terms) -> Schema:
        text = string(most=terms.limits.max_prompt_chars)
        return array(record({"text": text}, optional={"filename": nullable(text)}), most=terms.limits.max_extra_files)

    def read(self, value: Value) -> tuple[ExtraFile, ...]:
        words = self.words(value.terms)
        elements = value.elements(value.terms.limits.max_extra_files, words)
        files = tuple(_file(element, at, value) for at, element in enumerate(elements))
        num_chars = sum(len(file.name) + len(file.text) for file in files)
        if num_chars > value.terms.limits.max_prompt_chars:
            raise InvalidRequest.refusing(value.name, must=f"be {words}", found=f"{num_chars} characters")
        return files


def _file(element: object, at: int, value: Value) -> ExtraFile:
    allowed = 'an object with the string "text" and, maybe, the string "filename"'
    if not isinstance(element, dict):
        raise value.part_refused(at, allowed, element)
    for name in sorted(element.keys() - FILE_MEMBERS):
        value.ignore(name[:MAX_NAME_CHARS])
    text, name = element.get("text"), element.get("filename")
    if not isinstance(text, str) or not (name is None or isinstance(name, str)):
        raise value.part_refused(at, allowed, element)
    return ExtraFile(name=name or UNNAMED, text=text)


TEXT = Text(max_chars=lambda terms: terms.limits.max_prompt_chars)
INFILL: Mapping[str, Parameter] = {
    "input_prefix": Parameter(TEXT, "The text before the gap."),
    "input_suffix": Parameter(TEXT, "The text behind the gap."),
    "input_extra": Parameter(ExtraFiles(), "Other files of the project; the last matter most."),
    "prompt": Parameter(TEXT, "How the text in the gap begins; it is not returned."),
}
ASKED = ("input_prefix", "input_suffix")
NEEDLESS = ("suffix", "suffix_mode")
"""Of completions; here the gap is told by its own names."""
CUTS_BY_ITSELF: Mapping[str, object] = {"truncate_sequence": True}
"""An editor sends whole files, and llama.cpp takes what fits of them."""


def read_infill(
    members: Mapping[str, object], limits: WireLimits, dialect: Dialect, *, model: Callable[[], str]
) -> CompletionRequest:
    """Return the request that these members of a JSON object make.

    model: asked where none was sent

    Raises InvalidRequest.
    """
    terms = Terms(limits=limits, dialect=dialect)
    for name in NEEDLESS:
        if members.get(name) not in (None, ""):
            must = f'be absent at {Path.INFILL}, where "input_suffix" is what stands behind the gap'
            raise UnsupportedParameter.refusing(name, must=must, found="one")
    ignored: list[str] = []
    values: dict[str, Any] = {
        name: parameter.form.read(Value(name=name, sent=members[name], terms=terms, ignored=ignored))
        for name, parameter in INFILL.items()
        if members.get(name) is not None
    }
    for name in ASKED:
        if name not in values:
            raise InvalidRequest.refusing(name, must=f"be {INFILL[name].form.words(terms)}", found="nothing")
    rest = {name: value for name, value in members.items() if name not in INFILL and name not in NEEDLESS}
    _check_spelling(rest)
    if rest.get("model") is None:
        rest["model"] = model()
    return read_request(_body(values), rest, limits, dialect=dialect, ignored=ignored)


def _body(values: Mapping[str, Any]) -> Body[CompletionRequest]:
    """Return the kind of body whose prompt was read; what does not fit is cut unless the client refuses that."""
    gap = Infill(suffix=values["input_suffix"], opening=values.get("prompt", ""), files=values.get("input_extra", ()))
    given = {"prompts": (Prompt(parts=(values["input_prefix"],)),), "gap": gap, **CUTS_BY_ITSELF}
    return Body(request=CompletionRequest, table=NATIVE.table, required=("model",), defaults=given)


def _check_spelling(members: Mapping[str, object]) -> None:
    """Raise UnsupportedParameter for a name that looks like a misspelled one of this route."""
    for name in members:
        near = None if name in PARAMETERS else nearest(name, tuple(INFILL))
        if near is not None:
            must = f"be the name of a parameter of {Path.INFILL}"
            raise UnsupportedParameter.refusing(
                name, must=must, found="none of that name", remedy=f'Did you mean "{near}"?'
            )
