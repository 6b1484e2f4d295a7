"""What every form of values does: read one, say in words what is taken, and describe it as a JSON schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from serve_app.api.dialects.dialect import Dialect
from serve_app.api.limits import WireLimits
from serve_app.api.shown import shown
from serve_app.core.errors import InvalidRequest

Schema = dict[str, Any]
MAX_TOLD = 200
"""Names of what was ignored in one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What configuration and dialect allow together: a dialect widens the log-probabilities and narrows all else."""

    limits: WireLimits
    dialect: Dialect

    @property
    def max_n(self) -> int:
        return min(self.limits.max_n, self.dialect.max_n)

    @property
    def max_logprobs(self) -> int:
        return max(self.limits.max_logprobs, self.dialect.max_logprobs)

    @property
    def max_stop_strings(self) -> int:
        return min(self.limits.max_stop_strings, self.dialect.max_stop_strings or self.limits.max_stop_strings)


Number = int | float
Bound = Number | Callable[[Terms], Number]
"""One end of a range: fixed, or what the terms say."""


def bound_in(bound: Bound, terms: Terms) -> Number:
    return bound(terms) if callable(bound) else bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A parameter's value as it was sent; `name` is as the client spelled it.

    ignored: takes the names of what in it is not carried out, for the client to be told
    """

    name: str
    sent: object
    terms: Terms
    ignored: list[str] = field(default_factory=list)

    def ignore(self, part: str) -> None:
        """Have the client told once that this part of the value is not carried out."""
        path = f"{self.name}.{part}"
        if path not in self.ignored and len(self.ignored) < MAX_TOLD:
            self.ignored.append(path)

    def refused(self, allowed: str) -> InvalidRequest:
        return InvalidRequest.refusing(self.name, must=f"be {allowed}", found=shown(self.sent))

    def part_refused(self, at: int | str, allowed: str, found: object) -> InvalidRequest:
        path = f"{self.name}[{at if isinstance(at, int) else shown(at)}]"
        return InvalidRequest.refusing(path, must=f"be {allowed}", found=shown(found))

    def elements(self, max_length: int, allowed: str) -> list[object]:
        """The list that was sent. Raises InvalidRequest where it is none or too long."""
        if not isinstance(self.sent, list):
            raise self.refused(allowed)
        if len(self.sent) > max_length:
            raise InvalidRequest.refusing(self.name, must=f"be {allowed}", found=f"{len(self.sent)} elements")
        return self.sent


class Form(Protocol):
    """One form that values have. Null is no value and never gets here."""

    def words(self, terms: Terms) -> str:
        """What a value must be, to stand behind "must be"."""
        ...

    def schema(self, terms: Terms) -> Schema:
        """The JSON schema of what is taken."""
        ...

    def read(self, value: Value) -> object:
        """The value as `CompletionRequest` holds it. Raises InvalidRequest that says `words`."""
        ...


@dataclass(frozen=True, slots=True)
class Parameter:
    """The one declaration of a parameter, in the annotation of the field that holds it.

    about: one sentence for whoever reads the documentation
    name:  on the wire, where that is not the field's
    """

    form: Form
    about: str
    name: str | None = None
