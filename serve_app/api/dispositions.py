"""What is done with a parameter of some system: carried out, renamed, told as ignored, or refused by name."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.api.forms.form import Form, Parameter


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
