"""Reads a small body by the table of its members."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app.api.dialects.tables import UNION
from serve_app.api.forms.form import Parameter, Terms, Value
from serve_app.api.json_body import read_json_object
from serve_app.api.limits import WireLimits
from serve_app.api.paths import Path
from serve_app.core.errors import InvalidRequest, UnsupportedParameter


def read_members(
    body: bytes, table: Mapping[str, Parameter], limits: WireLimits, *, path: Path, required: str | None = None
) -> dict[str, Any]:
    """The members that are not null, in their forms.

    required: a member that must be there

    Raises InvalidRequest, and UnsupportedParameter for a name that the table lacks.
    """
    terms = Terms(limits=limits, dialect=UNION)
    values = {}
    for name, sent in read_json_object(body, max_depth=limits.max_depth).items():
        if sent is None:
            continue
        if name not in table:
            raise UnsupportedParameter.refusing(
                name[:100], must=f"be one of the parameters of {path}: {', '.join(table)}", found="none of that name"
            )
        values[name] = table[name].form.read(Value(name=name, sent=sent, terms=terms))
    if required is not None and required not in values:
        raise InvalidRequest.refusing(required, must=f"be {table[required].form.words(terms)}", found="nothing")
    return values
