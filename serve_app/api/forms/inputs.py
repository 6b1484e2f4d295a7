"""Tells the forms of `input` apart, which is what is embedded: texts, or lists of token ids."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.api.forms.form import Schema, Terms, Value
from serve_app.api.forms.numbers import TOKEN_ID
from serve_app.api.forms.prompts import parse_prompts
from serve_app.core.prompt import Prompt

ONE = "a non-empty string or a list of token ids"


@dataclass(frozen=True, slots=True)
class Inputs:
    """Every form of `input`: those of `prompt` without what is mixed or tagged."""

    def words(self, terms: Terms) -> str:
        return f"a string, a list of token ids, or a list of at most {terms.limits.max_inputs} strings or such lists"

    def schema(self, terms: Terms) -> Schema:
        limits = terms.limits
        text = {"type": "string", "minLength": 1, "maxLength": limits.max_prompt_chars}
        tokens = {"type": "array", "items": TOKEN_ID, "minItems": 1, "maxItems": limits.max_prompt_ids}
        several = {"type": "array", "items": {"anyOf": [text, tokens]}, "minItems": 1, "maxItems": limits.max_inputs}
        return {"anyOf": [text, tokens, several]}

    def read(self, value: Value) -> tuple[Prompt, ...]:
        limits = value.terms.limits
        if isinstance(value.sent, dict) or _is_mixed(value.sent):
            raise value.refused(self.words(value.terms))
        prompts = parse_prompts(value.sent, limits, name=value.name, max_prompts=limits.max_inputs)
        if isinstance(value.sent, list):
            for at, element in enumerate(value.sent):
                if isinstance(element, dict) or _is_mixed(element):
                    raise value.part_refused(at, ONE, element)
        return prompts


def _is_mixed(sent: object) -> bool:
    """Whether it is a list of text and token ids."""
    kinds = set(map(type, sent)) if isinstance(sent, list) else set()
    return str in kinds and bool(kinds & {int, float})
