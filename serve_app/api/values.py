"""Reads the values of parameters that have several forms, and says which part of one is wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from serve_app.api.limits import MAX_TOKEN_ID, WireLimits
from serve_app.api.shown import shown
from serve_app.core.errors import InvalidRequest, UnsupportedParameter
from serve_app.core.request import SamplerName

MAX_BIAS = 100.0
NUMERIC = re.compile(r"-?[0-9]+")
MAX_DIGITS = 18
SAMPLERS: tuple[SamplerName, ...] = get_args(SamplerName)
SAMPLER_NAMES: Mapping[str, SamplerName] = MappingProxyType({**{name: name for name in SAMPLERS}, "typical_p": "typ_p"})
LOGIT_EDITS = frozenset({"penalties", "dry"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A parameter's value as it was sent.

    name:    as the client spelled it;  allowed: what it must be, in words
    """

    name: str
    sent: object
    allowed: str
    limits: WireLimits
    num_prompts: int

    def refused(self) -> InvalidRequest:
        return InvalidRequest(f"`{self.name}` must be {self.allowed}; found {shown(self.sent)}.", self.name)

    def part_refused(self, at: int | str, allowed: str, found: object) -> InvalidRequest:
        path = f"{self.name}[{at if isinstance(at, int) else shown(at)}]"
        return InvalidRequest(f"`{path}` must be {allowed}; found {shown(found)}.", path)

    def elements(self, max_length: int) -> list[object]:
        """The list that was sent. Raises InvalidRequest where it is none or too long."""
        if not isinstance(self.sent, list):
            raise self.refused()
        if len(self.sent) > max_length:
            raise InvalidRequest(f"`{self.name}` must be {self.allowed}; found {len(self.sent)} elements.", self.name)
        return self.sent


def _read_strings(value: Value) -> tuple[str, ...]:
    """A string or a list of strings; empty ones are left out."""
    limits = value.limits
    strings = [value.sent] if isinstance(value.sent, str) else value.elements(limits.max_stop_strings)
    for at, string in enumerate(strings):
        path = f"{value.name}[{at}]" if isinstance(value.sent, list) else value.name
        if not isinstance(string, str):
            raise InvalidRequest(f"`{path}` must be a string; found {shown(string)}.", path)
        if len(string) > limits.max_stop_chars:
            raise InvalidRequest(
                f"`{path}` must be at most {limits.max_stop_chars} characters; found {len(string)}.", path
            )
    return tuple(dict.fromkeys(str(string) for string in strings if string))


def _read_breakers(value: Value) -> tuple[str, ...]:
    if value.sent == [] or (isinstance(value.sent, list) and "" in value.sent) or isinstance(value.sent, str):
        raise value.refused()
    return _read_strings(value)


def _read_lora_path(value: Value) -> str | tuple[str | None, ...]:
    sent = value.sent
    if isinstance(sent, str):
        if not sent:
            raise InvalidRequest(f'`{value.name}` must name an adapter; found "".', value.name)
        return sent
    if not isinstance(sent, list):
        raise value.refused()
    if len(sent) != value.num_prompts:
        raise InvalidRequest(
            f"`{value.name}` must have one element for each prompt, {value.num_prompts} in all; found {len(sent)}.",
            value.name,
        )
    for at, name in enumerate(sent):
        if name is not None and not (isinstance(name, str) and name):
            raise value.part_refused(at, "the name of an adapter or null", name)
    return tuple(sent)


def _read_lora(value: Value) -> tuple[tuple[int, float], ...]:
    """The adapters that are switched on. Raises UnsupportedParameter for a mixture and for a scale between 0 and 1."""
    if value.sent == {}:
        return ()
    switched_on: list[tuple[int, float]] = []
    for at, element in enumerate(value.elements(value.limits.max_n)):
        if not (isinstance(element, dict) and set(element) == {"id", "scale"}):
            raise value.part_refused(at, "an object with `id` and `scale`", element)
        place, scale = element["id"], element["scale"]
        if not (type(place) is int and 0 <= place <= MAX_TOKEN_ID):
            raise value.part_refused(at, "an object whose `id` is an adapter's number", element)
        if type(scale) not in (int, float) or scale not in (0, 1):
            raise UnsupportedParameter(
                f"`{value.name}[{at}].scale` must be 0 or 1, as adapters are not scaled by this server;"
                f" found {shown(scale)}.",
                f"{value.name}[{at}].scale",
            )
        if scale:
            switched_on.append((place, float(scale)))
    if len({place for place, _ in switched_on}) > 1:
        raise UnsupportedParameter(
            f"`{value.name}` must switch on one adapter at most; found {len(switched_on)}.", value.name
        )
    return tuple(switched_on)


def _read_token_ids(value: Value) -> tuple[int, ...]:
    """Token ids; nulls between them are left out."""
    token_ids: list[int] = []
    for at, element in enumerate(value.elements(value.limits.max_stop_token_ids)):
        if element is None:
            continue
        if not (type(element) is int and 0 <= element <= MAX_TOKEN_ID):
            raise value.part_refused(at, "a token id", element)
        token_ids.append(element)
    return tuple(dict.fromkeys(token_ids))


def _read_logit_bias(value: Value) -> tuple[tuple[int | str, float], ...]:
    if isinstance(value.sent, dict):
        if len(value.sent) > value.limits.max_logit_bias:
            raise value.refused()
        return tuple((_bias_key(key), _bias(value, key, bias)) for key, bias in value.sent.items() if key)
    pairs: list[tuple[int | str, float]] = []
    for at, pair in enumerate(value.elements(value.limits.max_logit_bias)):
        if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (int, str)):
            raise value.part_refused(at, "a pair of a token id or a text, and a number or false", pair)
        if pair[0] != "":
            key = _bias_key(pair[0]) if isinstance(pair[0], str) else max(-1, min(pair[0], MAX_TOKEN_ID))
            pairs.append((key, _bias(value, at, pair[1])))
    return tuple(pairs)


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


def _read_samplers(value: Value) -> tuple[SamplerName, ...]:
    names: list[SamplerName] = []
    for at, element in enumerate(value.elements(2 * len(SAMPLERS))):
        name = SAMPLER_NAMES.get(element) if isinstance(element, str) else None
        if name is None:
            raise value.part_refused(at, f"one of {', '.join(SAMPLERS)}", element)
        if name in names:
            raise value.part_refused(at, "a name that does not stand before", element)
        if name in LOGIT_EDITS and not LOGIT_EDITS.issuperset(names):
            raise value.part_refused(at, "before every sampler but penalties and dry", element)
        names.append(name)
    return tuple(names)


def _read_logprobs(value: Value) -> object:
    """A count; true is one, or what `top_logprobs` says, false is none."""
    if value.name == "logprobs" and isinstance(value.sent, bool):
        return 1 if value.sent else None
    return value.sent


def _replaced(old: int, new: int | None) -> Callable[[Value], object]:
    def read(value: Value) -> object:
        return new if type(value.sent) is int and value.sent == old else value.sent

    return read


READERS: Mapping[str, Callable[[Value], object]] = MappingProxyType(
    {
        "lora_path": _read_lora_path,
        "lora": _read_lora,
        "stop": _read_strings,
        "stop_regex": _read_strings,
        "stop_token_ids": _read_token_ids,
        "dry_sequence_breakers": _read_breakers,
        "logit_bias": _read_logit_bias,
        "samplers": _read_samplers,
        "logprobs": _read_logprobs,
        "top_k": _replaced(-1, 0),
        "seed": _replaced(-1, None),
    }
)
