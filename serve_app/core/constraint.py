"""What a completion's text has to be, as a client wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

ConstraintKind = Literal[
    "json_schema", "compact_json", "regex", "choice", "gbnf", "lark", "llguidance", "structural_tag", "tools"
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """One language that the text is to be of; nothing of it was checked but its form.

    kind:   what the source is written in; json_schema, llguidance, structural_tag and tools are JSON, compact_json is a
            schema of JSON without white space, choice a list of texts in JSON, of which the text is one
    source: text that the whole completion has to follow
    name:   the parameter it came in, as the client spelled it, for refusals
    """

    kind: ConstraintKind
    source: str
    name: str

    @property
    def digest(self) -> bytes:
        """The same for what means the same, whatever it was called."""
        return sha256(f"{self.kind}\0{self.source}".encode()).digest()
