"""What is done with a parameter of some system: carried out, accepted, renamed, or refused by name."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.api.forms.form import Form, Parameter


@dataclass(frozen=True, slots=True)
class Carried:
    """Carried out as it is declared."""

    parameter: Parameter


@dataclass(frozen=True, slots=True)
class Accepted:
    """Checked, and by contract without any effect."""

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
    """Known, not carried out: refused by name, unless its value is neutral, which changes nothing; false always is."""

    __slots__ = ("neutral",)

    def __init__(self, *neutral: object) -> None:
        self.neutral = (False, *(value for value in neutral if value is not False))

    def __repr__(self) -> str:
        return f"NotYet{self.neutral!r}"


Disposition = Carried | Renamed | Accepted | NotYet
