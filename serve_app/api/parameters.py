"""The table of every known request parameter and what this version does with it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import BaseModel

from serve_app.api.completion import CompletionRequest
from serve_app.api.dispositions import Carried, Disposition, Inert, NotYet, Renamed
from serve_app.api.forms.form import Form, Parameter
from serve_app.api.forms.shared import CANDIDATES, PROBABILITIES
from serve_app.api.forms.structured import GUIDED_GRAMMAR
from serve_app.api.not_carried_out import CHANGES_NO_ANSWER, CHANGES_THE_ANSWER
from serve_app.api.stream_options import StreamOptions

OTHER_NAMES: Mapping[str, Renamed] = MappingProxyType(
    {
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
)


def declared(model: type[BaseModel]) -> dict[str, Parameter]:
    """The parameters in the annotations of a model's fields, by their names on the wire."""
    return {
        each.name or field_name: each
        for field_name, field in model.model_fields.items()
        for each in field.metadata
        if isinstance(each, Parameter)
    }


PARAMETERS: Mapping[str, Disposition] = MappingProxyType(
    {
        **{name: Carried(parameter) for name, parameter in declared(CompletionRequest).items()},
        "top_logprobs": Carried(Parameter(CANDIDATES, "The count of log-probabilities where `logprobs` is true.")),
        **OTHER_NAMES,
        **CHANGES_THE_ANSWER,
        **CHANGES_NO_ANSWER,
    }
)
STREAM_OPTIONS: Mapping[str, Disposition] = MappingProxyType(
    {
        **{name: Carried(parameter) for name, parameter in declared(StreamOptions).items()},
        "include_obfuscation": Inert(),
    }
)


def form_of(name: str, table: Mapping[str, Disposition] = PARAMETERS) -> Form:
    """Of the values that are taken under this name."""
    match table[name]:
        case Carried(parameter):
            return parameter.form
        case Renamed(form=form) if form is not None:
            return form
        case Renamed(to=other):
            return form_of(other, table)
        case NotYet() | Inert():
            raise AssertionError(f"{name} is not carried out, so it has no form")
