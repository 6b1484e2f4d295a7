"""What a completion is expected to be: content as OpenAI's predicted outputs have it, or a text or token ids alone."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.api.forms.form import Schema, Terms, Value
from serve_app.api.forms.numbers import TOKEN_ID, integral, is_token_id

TYPE, CONTENT = "type", "content"


@dataclass(frozen=True, slots=True)
class Prediction:
    """`{"type": "content", "content": …}`, its content a string or a list of parts of text."""

    def words(self, terms: Terms) -> str:
        most = terms.limits.max_prompt_chars
        return (
            f'an object of the type "content" whose content is a string or a list of objects of the type "text", of at'
            f" most {most} characters together"
        )

    def schema(self, terms: Terms) -> Schema:
        text = {"type": "string", "maxLength": terms.limits.max_prompt_chars}
        return _record(CONTENT, {"anyOf": [text, {"type": "array", "items": _record("text", text)}]})

    def read(self, value: Value) -> str:
        content = _member(value.sent, kind=CONTENT)
        texts = [_member(part, kind="text") for part in content] if isinstance(content, list) else [content]
        strings = [text for text in texts if isinstance(text, str)]
        is_whole = len(strings) == len(texts)
        if not is_whole or sum(map(len, strings)) > value.terms.limits.max_prompt_chars:
            raise value.refused(self.words(value.terms))
        return "".join(strings)


@dataclass(frozen=True, slots=True)
class Speculation:
    """A text, or a list of token ids."""

    def words(self, terms: Terms) -> str:
        limits = terms.limits
        return (
            f"a string of at most {limits.max_prompt_chars} characters or a list of at most"
            f" {limits.max_prompt_ids} token ids"
        )

    def schema(self, terms: Terms) -> Schema:
        text = {"type": "string", "maxLength": terms.limits.max_prompt_chars}
        return {"anyOf": [text, {"type": "array", "items": TOKEN_ID, "maxItems": terms.limits.max_prompt_ids}]}

    def read(self, value: Value) -> str | tuple[int, ...]:
        words, limits = self.words(value.terms), value.terms.limits
        if isinstance(value.sent, str):
            if len(value.sent) > limits.max_prompt_chars:
                raise value.refused(words)
            return value.sent
        token_ids = []
        for at, element in enumerate(value.elements(limits.max_prompt_ids, words)):
            token_id = integral(element)
            if token_id is None or not is_token_id(token_id):
                raise value.part_refused(at, "a token id", element)
            token_ids.append(token_id)
        return tuple(token_ids)


def _member(sent: object, *, kind: str) -> object:
    """What is under the name of its own type; None where it is of another."""
    return sent.get(kind) if isinstance(sent, dict) and sent.get(TYPE) == kind else None


def _record(kind: str, content: Schema) -> Schema:
    return {"type": "object", "properties": {TYPE: {"const": kind}, kind: content}, "required": [TYPE, kind]}
