"""Token ids in lists, and what is added to the logits of some of them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from serve_app.api.forms.form import Schema, Terms, Value
from serve_app.api.forms.numbers import TOKEN_ID, integral, is_token_id
from serve_app.api.limits import MAX_TOKEN_ID

MAX_BIAS = 100.0
NUMERIC = re.compile(r"-?[0-9]+")
MAX_DIGITS = 18


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A list of token ids; nulls between them and those that stand before are left out."""

    def words(self, terms: Terms) -> str:
        return f"a list of at most {terms.limits.max_stop_token_ids} token ids"

    def schema(self, terms: Terms) -> Schema:
        items = {"anyOf": [TOKEN_ID, {"type": "null"}]}
        return {"type": "array", "items": items, "maxItems": terms.limits.max_stop_token_ids}

    def read(self, value: Value) -> tuple[int, ...]:
        token_ids: list[int] = []
        for at, element in enumerate(value.elements(value.terms.limits.max_stop_token_ids, self.words(value.terms))):
            token_id = integral(element)
            if token_id is None:
                continue
            if not is_token_id(token_id):
                raise value.part_refused(at, "a token id", element)
            token_ids.append(token_id)
        return tuple(dict.fromkeys(token_ids))


@dataclass(frozen=True, slots=True)
class AllowedIds:
    """A list of token ids, as many as may be biased; of none of them nothing could be drawn."""

    def words(self, terms: Terms) -> str:
        return f"a list of 1 to {terms.limits.max_logit_bias} token ids"

    def schema(self, terms: Terms) -> Schema:
        return {"type": "array", "items": TOKEN_ID, "minItems": 1, "maxItems": terms.limits.max_logit_bias}

    def read(self, value: Value) -> tuple[int, ...]:
        elements = value.elements(value.terms.limits.max_logit_bias, self.words(value.terms))
        if not elements:
            raise value.refused(self.words(value.terms))
        return tuple(dict.fromkeys(_token_id(value, at, element) for at, element in enumerate(elements)))


@dataclass(frozen=True, slots=True)
class TokenText:
    """The tokens of a text, every one as it stands."""

    def words(self, terms: Terms) -> str:
        return f"a list of at most {terms.limits.max_prompt_ids} token ids"

    def schema(self, terms: Terms) -> Schema:
        return {"type": "array", "items": TOKEN_ID, "maxItems": terms.limits.max_prompt_ids}

    def read(self, value: Value) -> tuple[int, ...]:
        elements = value.elements(value.terms.limits.max_prompt_ids, self.words(value.terms))
        return tuple(_token_id(value, at, element) for at, element in enumerate(elements))


@dataclass(frozen=True, slots=True)
class LogitBias:
    """An object or pairs, from a token id or a text whose tokens all get it; false is minus infinity."""

    def words(self, terms: Terms) -> str:
        return (
            f"an object or a list of pairs, at most {terms.limits.max_logit_bias} of them, from token ids or texts to"
            " numbers or false"
        )

    def schema(self, terms: Terms) -> Schema:
        most = terms.limits.max_logit_bias
        bias = {"anyOf": [{"type": "number"}, {"const": False}]}
        key = {"anyOf": [{"type": "integer"}, {"type": "string"}]}  # of which vocabulary, the model says
        pair = {"type": "array", "prefixItems": [key, bias], "minItems": 2, "maxItems": 2}
        return {
            "anyOf": [
                {"type": "object", "additionalProperties": bias, "maxProperties": most},
                {"type": "array", "items": pair, "maxItems": most},
            ]
        }

    def read(self, value: Value) -> tuple[tuple[int | str, float], ...]:
        most = value.terms.limits.max_logit_bias
        if isinstance(value.sent, dict):
            if len(value.sent) > most:
                raise value.refused(self.words(value.terms))
            return tuple((_bias_key(key), _bias(value, key, bias)) for key, bias in value.sent.items() if key)
        pairs = (_pair(value, at, pair) for at, pair in enumerate(value.elements(most, self.words(value.terms))))
        return tuple(pair for pair in pairs if pair[0] != "")


def _token_id(value: Value, at: int, element: object) -> int:
    token_id = integral(element)
    if not is_token_id(token_id):
        raise value.part_refused(at, "a token id", element)
    return token_id


def _pair(value: Value, at: int, pair: object) -> tuple[int | str, float]:
    first = integral(pair[0]) if isinstance(pair, list) and len(pair) == 2 else None
    if not isinstance(pair, list) or isinstance(first, bool) or not isinstance(first, int | str):
        raise value.part_refused(at, "a pair of a token id or a text, and a number or false", pair)
    key = _bias_key(first) if isinstance(first, str) else max(-1, min(first, MAX_TOKEN_ID))
    return key, _bias(value, at, pair[1])


def _bias_key(key: str) -> int | str:
    """A key that looks like a number is a token id; one that no vocabulary can have stays outside of it."""
    if not NUMERIC.fullmatch(key):
        return key
    digits = key.lstrip("-0")[: MAX_DIGITS + 1] or "0"  # more of them are no other answer
    return max(-1, -int(digits)) if key.startswith("-") else min(int(digits), MAX_TOKEN_ID)


def _bias(value: Value, at: int | str, bias: object) -> float:
    if bias is False:
        return -math.inf
    if isinstance(bias, bool) or not isinstance(bias, int | float):
        raise value.part_refused(at, "a number or false", bias)
    return float(max(-MAX_BIAS, min(MAX_BIAS, bias)))
