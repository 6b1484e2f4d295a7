"""Every known request parameter, what this version does with it, and the members of a body sorted by that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from serve_app.api.completion import CompletionRequest
from serve_app.api.error_text import nearest, shown
from serve_app.api.forms.constraints import GUIDED_GRAMMAR
from serve_app.api.forms.form import CANDIDATES, PROBABILITIES, Form, Parameter, Terms, Value
from serve_app.api.groups import StreamOptions
from serve_app.core.errors import InvalidRequest, UnsupportedParameter

MAX_IGNORED = 100


@dataclass(frozen=True, slots=True)
class Carried:
    """Carried out as it is declared."""

    parameter: Parameter


@dataclass(frozen=True, slots=True)
class Renamed:
    """Another system's name for a parameter.

    absent:  values that mean absence under this name, though not under the other
    besides: what this name does that the other does not
    form:    of its values, where it takes less than the other
    """

    to: str
    absent: tuple[object, ...] = ()
    besides: str = ""
    form: Form | None = None


class NotYet:
    """It would change the answer and is not carried out: refused by name, unless its value is neutral, as false is.

    beside:  a parameter that says the same; where that is sent, this name is told as ignored
    instead: what a client may send in its place, for the refusal
    """

    __slots__ = ("beside", "instead", "neutral")

    def __init__(self, *neutral: object, beside: str = "", instead: str = "") -> None:
        self.neutral = (False, *(value for value in neutral if value is not False))
        self.beside = beside
        self.instead = instead or (f'Send "{beside}".' if beside else "Leave it out.")

    def __repr__(self) -> str:
        return f"NotYet{self.neutral!r}"


@dataclass(frozen=True, slots=True)
class Inert:
    """It changes no answer: any value is accepted, and told as ignored unless it says nothing."""

    neutral: tuple[object, ...] = (False, "", {}, [])


Disposition = Carried | Renamed | NotYet | Inert


CHANGES_THE_ANSWER: Mapping[str, NotYet] = {
    "raw_output": NotYet(instead='Send "return_token_ids": true.'),
    "strict": NotYet(),
    "custom_logit_processor": NotYet(),
    "use_beam_search": NotYet(instead='Send "best_of".'),
    "num_beams": NotYet(0, 1, instead='Send "best_of".'),
    "min_length": NotYet(0, beside="min_tokens"),
    "ban_eos_token": NotYet(beside="ignore_eos"),
    "prompt_embeds": NotYet([]),
    "vllm_xargs": NotYet({}),
    "logprob_token_ids": NotYet(),
    "repetition_detection": NotYet(),
    "thinking_token_budget": NotYet(-1),
    "watermarking": NotYet(),
    "return_token_offsets": NotYet(),
    "routed_experts_prompt_start": NotYet(0),
    "guided_whitespace_pattern": NotYet(""),
    "banned_strings": NotYet([]),
    "banned_tokens": NotYet([], beside="logit_bias"),
    "custom_token_bans": NotYet("", [], beside="logit_bias"),
    "logits_processors": NotYet([]),
    "top_a": NotYet(0),
    "tfs": NotYet(1),
    "tfs_z": NotYet(1),
    "epsilon_cutoff": NotYet(0),
    "eta_cutoff": NotYet(0),
    "penalty_alpha": NotYet(0),
    "skew": NotYet(0),
    "no_repeat_ngram_size": NotYet(0),
    "encoder_repetition_penalty": NotYet(1),
    "smoothing_factor": NotYet(0),
    "guidance_scale": NotYet(1),
    "negative_prompt": NotYet(""),
    "dynamic_temperature": NotYet(beside="dynatemp_range"),
}
"""Each is refused by name; its neutral values pass."""

CHANGES_NO_ANSWER: Mapping[str, Inert] = {
        # where and when it is computed, and what is kept of it
        **dict.fromkeys(
            (
                "models", "n_keep", "n_discard", "rid", "session_id", "routed_dp_rank", "bootstrap_host",
                "bootstrap_port", "bootstrap_room", "kv_transfer_params", "ec_transfer_params", "prompt_cache_key",
                "prompt_cache_options", "prompt_cache_retention", "service_tier", "store", "t_max_prompt_ms",
            ),
            Inert(),
        ),
        "id_slot": Inert((False, -1)),
        "priority": Inert((False, 0)),
        # for whom, and what the client notes about it
        **dict.fromkeys(("metadata", "safety_identifier"), Inert()),
        # how it is sent, or what is measured beside it
        **dict.fromkeys(("perf_metrics_in_response", "return_progress"), Inert()),
        "stream_interval": Inert((False, 1)),
        # of means that are not used here: beams, a processor of logits, a choice among compilers, a tokenizer's spaces
        **dict.fromkeys(("early_stopping", "custom_params", "guided_decoding_backend"), Inert()),
        "length_penalty": Inert((False, 1)),
        "spaces_between_special_tokens": Inert((False, True)),
        # of chats and of llama.cpp's own results; each is carried out where it says something
        **dict.fromkeys(("modalities", "reasoning_effort", "response_fields", "thinking", "verbosity"), Inert()),
    }  # fmt: skip
"""Each is accepted with any value, and told in X-Ignored-Parameters."""
OTHER_NAMES: Mapping[str, Renamed] = {
    "n_cmpl": Renamed("n"),
    "max_completion_tokens": Renamed("max_tokens"),
    "n_predict": Renamed("max_tokens"),
    "num_predict": Renamed("max_tokens"),
    "typ_p": Renamed("typical_p"),
    "typical": Renamed("typical_p"),
    "top_nsigma": Renamed("top_n_sigma"),
    "nsigma": Renamed("top_n_sigma"),
    "repeat_penalty": Renamed("repetition_penalty"),
    "mirostat_target": Renamed(
        "mirostat_tau", absent=(0,), besides="It switches Mirostat 2 on, unless `mirostat` is sent; 0 is absence."
    ),
    "mirostat_lr": Renamed("mirostat_eta"),
    "mirostat_mode": Renamed("mirostat"),
    "repetition_penalty_range": Renamed("repeat_last_n", absent=(0,), besides="0 is absence."),
    "include_stop_str_in_output": Renamed("no_stop_trim"),
    "n_probs": Renamed("logprobs", absent=(0,), besides="0 is absence.", form=PROBABILITIES),
    "return_tokens": Renamed("return_token_ids"),
    "add_bos_token": Renamed("add_special_tokens"),
    "grammar_string": Renamed("grammar"),
    "extra_key": Renamed("cache_salt"),
    "prompt_cache_isolation_key": Renamed("cache_salt"),
    "guided_json": Renamed("json_schema"),
    "guided_regex": Renamed("regex"),
    "guided_grammar": Renamed("grammar", form=GUIDED_GRAMMAR),
}


def declared(model: type[BaseModel]) -> dict[str, Parameter]:
    """Return the parameters of a model, by their names on the wire."""
    return {parameter.name or field_name: parameter for field_name, _, parameter in _fields(model)}


def defaults_of(model: type[BaseModel]) -> dict[str, object]:
    """Return the defaults of a model's parameters, by their fields."""
    return {name: field.get_default() for name, field, _ in _fields(model) if not field.is_required()}


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo, Parameter]]:
    for name, info in model.model_fields.items():
        yield from ((name, info, each) for each in info.metadata if isinstance(each, Parameter))


PARAMETERS: Mapping[str, Disposition] = {
    **{name: Carried(parameter) for name, parameter in declared(CompletionRequest).items()},
    "top_logprobs": Carried(Parameter(CANDIDATES, "The count of log-probabilities where `logprobs` is true.")),
    **OTHER_NAMES,
    **CHANGES_THE_ANSWER,
    **CHANGES_NO_ANSWER,
}
STREAM_OPTIONS: Mapping[str, Disposition] = {
    **{name: Carried(parameter) for name, parameter in declared(StreamOptions).items()},
    "include_obfuscation": Inert(),
}


def form_of(name: str, table: Mapping[str, Disposition] = PARAMETERS) -> Form:
    """Return the form of the values that this name takes."""
    match table[name]:
        case Carried(parameter):
            return parameter.form
        case Renamed(form=form) if form is not None:
            return form
        case Renamed(to=other):
            return form_of(other, table)
        case NotYet() | Inert():
            raise AssertionError(f"{name} is not carried out, so it has no form")


@dataclass(slots=True)
class Fields:
    """Values by canonical name, without nulls, and how the client spelled each name.

    names:   every name with a value, as it was spelled
    ignored: names with a value that changes no answer, and names that are no parameters
    """

    values: dict[str, object] = field(default_factory=dict)
    spelling: dict[str, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    ignored: list[str] = field(default_factory=list)

    def spelled(self, name: str) -> str:
        return self.spelling.get(name, name)


def read_fields(
    members: Mapping[str, object], table: Mapping[str, Disposition], *, within: str = "", refuses_unknown: bool = False
) -> Fields:
    """Sort the members by their disposition; null is absence. `within` is the path that messages put before a name.

    A name that is nobody's is ignored, unless `refuses_unknown`, or it looks like a misspelled one that is carried
    out.
    Raises UnsupportedParameter for such names and for values not carried out, InvalidRequest where two names of one
    parameter disagree.
    """
    fields = Fields()
    for spelled, value in sorted(members.items(), key=lambda member: _has_own_form(table.get(member[0]))):
        if value is None:
            continue
        disposition = table.get(spelled)
        if disposition is None:
            near = nearest(spelled, tuple(name for name, each in table.items() if isinstance(each, Carried | Renamed)))
            if refuses_unknown or near is not None or len(fields.ignored) == MAX_IGNORED:
                raise _unknown(spelled, near, within)
            fields.ignored.append(within + spelled)
            continue
        name = spelled
        if isinstance(disposition, Renamed):
            if _is_among(value, disposition.absent):
                continue
            name, disposition = disposition.to, table[disposition.to]
        match disposition:
            case Carried():
                _keep(fields, name, spelled=within + spelled, value=value)
            case NotYet() | Inert() if _is_among(value, disposition.neutral):
                pass
            case NotYet(beside=beside) if not beside or members.get(beside) is None:
                raise _not_carried_out(within + spelled, disposition, value)
            case NotYet() | Inert():
                fields.ignored.append(within + spelled)
            case Renamed():
                raise AssertionError(f"{name} is renamed twice")
            case _:
                assert_never(disposition)
    return fields


def _has_own_form(disposition: Disposition | None) -> bool:
    """Return whether a name takes other values than the parameter's own; it is read last, so that its form counts."""
    return isinstance(disposition, Renamed) and disposition.form is not None


def is_same(left: object, right: object) -> bool:
    """Return whether two JSON values are equal: numbers by value, but a boolean is never a number."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _keep(fields: Fields, name: str, *, spelled: str, value: object) -> None:
    if name in fields.values and not is_same(fields.values[name], value):
        raise InvalidRequest.refusing(
            spelled,
            must=f'be what "{fields.spelled(name)}" is, as both are names of one parameter',
            found=f"{shown(value)} beside {shown(fields.values[name])}",
            remedy="Send one of them.",
        )
    fields.values[name] = value
    fields.spelling[name] = spelled
    fields.names.add(spelled)


def _is_among(value: object, values: tuple[object, ...]) -> bool:
    return any(is_same(value, other) for other in values)


def _not_carried_out(spelled: str, disposition: NotYet, value: object) -> UnsupportedParameter:
    allowed = " or ".join([*map(shown, disposition.neutral), "null"])
    must = f"be {allowed}, as it is not carried out here"
    return UnsupportedParameter.refusing(spelled, must=must, found=shown(value), remedy=disposition.instead)


def _unknown(spelled: str, near: str | None, within: str) -> UnsupportedParameter:
    name = within + (spelled if len(spelled) <= 100 else spelled[:100] + "…")
    hint = "" if near is None else f'Did you mean "{within}{near}"?'
    return UnsupportedParameter.refusing(
        name, must="be the name of a parameter of completions", found="none of that name", remedy=hint
    )


def read_values(fields: Fields, table: Mapping[str, Disposition], terms: Terms) -> dict[str, Any]:
    """Read each value by its form. Raises InvalidRequest."""
    values = {}
    for name, sent in fields.values.items():
        spelled = fields.spelled(name)
        form = form_of(spelled if spelled in table else name, table)
        values[name] = form.read(Value(name=spelled, sent=sent, terms=terms, ignored=fields.ignored))
    return values
