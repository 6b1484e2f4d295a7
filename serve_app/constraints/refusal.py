"""Why a constraint is not taken."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from serve_app.core.errors import InvalidRequest
from serve_app.core.request import Constraint, ConstraintKind

LANGUAGES: Mapping[ConstraintKind, str] = MappingProxyType(
    {
        "json_schema": "a JSON schema",
        "compact_json": "a JSON schema",
        "choice": "a list of texts",
        "gbnf": "a grammar in GBNF",
        "regex": "a regular expression",
        "lark": "a grammar in Lark",
        "llguidance": "a grammar of llguidance",
        "structural_tag": "a structural tag",
        "tools": "JSON schemas of arguments",
    }
)


class Refusal(Exception):
    """What is wrong with a source, in a clause that stands behind a colon.

    path: where in a schema, as a JSON pointer; "" is nowhere in particular
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message, path)
        self.message = message
        self.path = path

    def of(self, constraint: Constraint) -> InvalidRequest:
        """The same for the client that sent this constraint."""
        where = f" at {self.path}" if self.path else ""
        must = f"hold {LANGUAGES[constraint.kind]} that can be followed"
        return InvalidRequest.refusing(constraint.name, must=must, found=f"this{where}: {self.message}")
