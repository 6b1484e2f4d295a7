"""Why a constraint is not taken."""

from __future__ import annotations

from serve_app.core.constraint import Constraint
from serve_app.core.errors import InvalidRequest


class Refusal(Exception):
    """What is wrong with a source, in words that stand behind the parameter's name.

    path: where in a schema, as a JSON pointer; "" is nowhere in particular
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message, path)
        self.message = message
        self.path = path

    def of(self, constraint: Constraint) -> InvalidRequest:
        """The same for the client that sent this constraint."""
        where = f" at {self.path}" if self.path else ""
        return InvalidRequest(f"`{constraint.name}`{where}: {self.message}.", constraint.name)
