"""Walks a JSON object along a table of parameters and keeps what is to be carried out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from serve_app.api.dispositions import Carried, Disposition, Inert, NotYet, Renamed
from serve_app.api.shown import shown
from serve_app.api.spelling import nearest
from serve_app.core.errors import InvalidRequest, UnsupportedParameter

MAX_IGNORED = 100


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
    members: Mapping[str, object],
    table: Mapping[str, Disposition],
    *,
    within: str = "",
    refuses_unknown: bool = False,
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
    """Whether a name takes other values than the parameter's own; it is read last, so that its form counts."""
    return isinstance(disposition, Renamed) and disposition.form is not None


def is_same(left: object, right: object) -> bool:
    """JSON equality: numbers by value, but a boolean is never a number."""
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
