"""Reads what a model's folder recommends for sampling, in its generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.files import read_json_object

FILE = "generation_config.json"
MAX_BYTES = 2**20
COUNT = 2**31 - 1
NUMBER = 1e9
ELSEWHERE = frozenset(
    {
        "do_sample",
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "transformers_version",
        "use_cache",
        "cache_implementation",
    }
)
"""Read below or by others, or of no text."""


class Bounds(NamedTuple):
    """A parameter of a request, and the values that it may have."""

    name: str
    low: float
    high: float
    is_count: bool = False


PARAMETERS: Mapping[str, Bounds] = {
    "temperature": Bounds("temperature", 0, NUMBER),
    "top_p": Bounds("top_p", 0, 1),
    "top_k": Bounds("top_k", -1, COUNT, is_count=True),
    "min_p": Bounds("min_p", 0, 1),
    "typical_p": Bounds("typical_p", 1e-9, 1),
    "repetition_penalty": Bounds("repetition_penalty", 1e-9, NUMBER),
    "presence_penalty": Bounds("presence_penalty", -NUMBER, NUMBER),
    "frequency_penalty": Bounds("frequency_penalty", -NUMBER, NUMBER),
    "max_new_tokens": Bounds("max_tokens", 1, COUNT, is_count=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultSampling:
    """What requests to a model sample with, where they do not say it themselves.

    values:  by the names of a request's parameters
    unheard: sentences about what else the file says; nothing follows from that
    """

    values: tuple[tuple[str, float], ...] = ()
    unheard: tuple[str, ...] = ()


def read_default_sampling(folder: Path) -> DefaultSampling:
    """Of a model folder. What the file says wrongly counts as not said, and is told. `do_sample: false` is greedy."""
    try:
        said = read_json_object(folder / FILE, max_bytes=MAX_BYTES)
    except FileNotFoundError:
        return DefaultSampling()
    except (OSError, CatalogError) as error:
        return DefaultSampling(unheard=(f"{FILE}: no sampling is read of it: {error}",))
    values: dict[str, float] = {}
    unheard = []
    others = [key for key, value in said.items() if value and key not in {*PARAMETERS, *ELSEWHERE} and key[0] != "_"]
    if others:
        unheard.append(f"{FILE}: not carried out here: {', '.join(others)}")
    for key, bounds in PARAMETERS.items():
        value = said.get(key)
        if value is None:
            continue
        if (number := _within(bounds, value)) is None:
            must = f"must be a {'whole ' * bounds.is_count}number from {bounds.low:g} to {bounds.high:g}"
            unheard.append(f"{FILE}: {key} {must} and is not read, found {str(value)[:40]}")
        else:
            values[bounds.name] = number
    if said.get("do_sample") is False:
        values["temperature"] = 0.0
    return DefaultSampling(values=tuple(values.items()), unheard=tuple(unheard))


def _within(bounds: Bounds, value: object) -> float | None:
    """The value where it is a number within the bounds. A count of -1 is none, as 0 is."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not bounds.low <= value <= bounds.high:
        return None
    if not bounds.is_count:
        return float(value)
    return max(0, int(value)) if value == int(value) else None
