"""The body of POST /infill, llama.cpp's: a gap by its own names, and every parameter of a completion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects.dialect import Dialect
from serve_app.api.forms.files import ExtraFiles
from serve_app.api.forms.form import Parameter, Terms, Value
from serve_app.api.forms.plain import Text
from serve_app.api.limits import WireLimits
from serve_app.api.parameters import PARAMETERS
from serve_app.api.parse import NATIVE, Body, read_request
from serve_app.api.paths import Path
from serve_app.api.spelling import nearest
from serve_app.core.errors import InvalidRequest, UnsupportedParameter
from serve_app.core.prompt import Infill, Prompt

TEXT = Text(max_chars=lambda terms: terms.limits.max_prompt_chars)
INFILL: Mapping[str, Parameter] = MappingProxyType(
    {
        "input_prefix": Parameter(TEXT, "The text before the gap."),
        "input_suffix": Parameter(TEXT, "The text behind the gap."),
        "input_extra": Parameter(ExtraFiles(), "Other files of the project; the last matter most."),
        "prompt": Parameter(TEXT, "How the text in the gap begins; it is not returned."),
    }
)
ASKED = ("input_prefix", "input_suffix")
NEEDLESS = ("suffix", "suffix_mode")
"""Of completions; here the gap is told by its own names."""
CUTS_BY_ITSELF: Mapping[str, object] = MappingProxyType({"truncate_sequence": True})
"""An editor sends whole files, and llama.cpp takes what fits of them."""


def read_infill(
    members: Mapping[str, object], limits: WireLimits, dialect: Dialect, *, model: Callable[[], str]
) -> CompletionRequest:
    """The request that these members of a JSON object make.

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
    """Of a completion whose prompt was read already. What does not fit is cut unless that is refused."""
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
