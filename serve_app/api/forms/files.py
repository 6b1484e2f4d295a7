"""Files of a project that a gap is filled in."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.api.forms.form import Schema, Terms, Value
from serve_app.api.openapi_schemas import nullable
from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import ExtraFile

FILE_MEMBERS = {"text", "filename"}
MAX_NAME_CHARS = 64
UNNAMED = "tmp"
"""What llama.cpp calls a file without a name."""


@dataclass(frozen=True, slots=True)
class ExtraFiles:
    """A list of objects with a text and, maybe, a name; together no longer than a prompt may be."""

    def words(self, terms: Terms) -> str:
        limits = terms.limits
        return (
            f'a list of at most {limits.max_extra_files} objects {{"filename": string, "text": string}},'
            f" of at most {limits.max_prompt_chars} characters together"
        )

    def schema(self, terms: Terms) -> Schema:
        text: Schema = {"type": "string", "maxLength": terms.limits.max_prompt_chars}
        one = {
            "type": "object",
            "properties": {"text": text, "filename": nullable(text)},
            "required": ["text"],
        }
        return {"type": "array", "items": one, "maxItems": terms.limits.max_extra_files}

    def read(self, value: Value) -> tuple[ExtraFile, ...]:
        words = self.words(value.terms)
        elements = value.elements(value.terms.limits.max_extra_files, words)
        files = tuple(_file(element, at, value) for at, element in enumerate(elements))
        num_chars = sum(len(file.name) + len(file.text) for file in files)
        if num_chars > value.terms.limits.max_prompt_chars:
            raise InvalidRequest.refusing(value.name, must=f"be {words}", found=f"{num_chars} characters")
        return files


def _file(element: object, at: int, value: Value) -> ExtraFile:
    allowed = 'an object with the string "text" and, maybe, the string "filename"'
    if not isinstance(element, dict):
        raise value.part_refused(at, allowed, element)
    for name in sorted(element.keys() - FILE_MEMBERS):
        value.ignore(name[:MAX_NAME_CHARS])
    text, name = element.get("text"), element.get("filename")
    if not isinstance(text, str) or not (name is None or isinstance(name, str)):
        raise value.part_refused(at, allowed, element)
    return ExtraFile(name=name or UNNAMED, text=text)
