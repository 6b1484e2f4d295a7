"""Aliases: further names of models, each for one address or for several by weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from hashlib import blake2b

from serve_app.catalog.files import CatalogError

Weights = Mapping[str, float]
"""Of addresses: how often each is meant, beside the others."""
Order = Callable[[str, Weights], Sequence[str]]
"""Puts the targets of an alias, which it is told by name, in the order in which they are tried."""
MAX_TARGETS = 16
MAX_WEIGHT = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """What a further name means.

    weights: of the addresses that answer; other aliases may be among them
    shadow:  by address, the percentage of requests that it computes, too, without being shown
    """

    weights: Weights
    shadow: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_weighted(self) -> bool:
        """Whether it depends on the request who answers."""
        return len(self.targets) > 1

    @property
    def targets(self) -> tuple[str, ...]:
        """Addresses that answer at all, the heaviest first."""
        return tuple(heaviest_first("", self.weights))

    def told(self) -> str:
        """Return in one sentence who answers how often."""
        whole = math.fsum(self.weights.values())
        shares = ", ".join(f"{target} {100 * self.weights[target] / whole:.3g}%" for target in self.targets)
        answers = f"of its requests answers {shares}; the same tenant and `user` get the same one again"
        hidden = [f"{target} computes {percent:g}% of them, too, unseen" for target, percent in self.shadow.items()]
        return "; ".join([answers, *hidden])


Aliases = Mapping[str, Alias]


def heaviest_first(alias: str, weights: Weights) -> list[str]:
    """Return the targets as they are tried for questions that are no request; of equals the one that is named first."""
    return sorted((target for target, weight in weights.items() if weight > 0), key=lambda target: -weights[target])


def read_alias(said: object) -> Alias:
    """Return what an alias is in a cluster file. Raises CatalogError.

    said: an address, weights by address, or either as `to` with percentages by address as `shadow`
    """
    if isinstance(said, Alias):
        return said
    if isinstance(said, str):
        return Alias(weights={said: 1.0})
    if not isinstance(said, Mapping):
        raise CatalogError('must be an address, or weights by address as {"demo:a": 95, "demo:b": 5}')
    if not isinstance(said.get("to"), str | Mapping):
        return Alias(weights=_weights(said))
    if unknown := [str(key) for key in said if key not in ("to", "shadow")]:
        raise CatalogError(f'takes "shadow" beside "to", found {", ".join(unknown)}')
    shadow = said.get("shadow", {})
    if not isinstance(shadow, Mapping):
        raise CatalogError(f'"shadow" must be percentages by address as {{"demo:b": 10}}, found {shadow!r}')
    return replace(read_alias(said["to"]), shadow=_shadow(shadow))


def _shadow(said: Mapping[object, object]) -> dict[str, float]:
    percentages = _numbers(said, "the percentage", 100.0) if said else {}
    return {target: percent for target, percent in percentages.items() if percent}


def read_aliases(said: Mapping[str, object]) -> dict[str, Alias]:
    """Return all aliases of a cluster file. Raises CatalogError, also for aliases in a circle."""
    aliases = {}
    for name, each in said.items():
        if not name or name != name.strip():
            raise CatalogError(f"alias {name!r}: a name must not be empty, nor begin or end with a space")
        try:
            aliases[name] = read_alias(each)
        except CatalogError as error:
            raise CatalogError(f"alias {name!r}: {error}") from None
    _check_circles(aliases)
    return aliases


def addresses_of(name: str, aliases: Aliases, order: Order = heaviest_first) -> Iterator[str]:
    """Yield the addresses that a name stands for, in the order in which they are tried; no alias is among them."""
    if name not in aliases:
        yield name
        return
    for target in order(name, aliases[name].weights):
        yield from addresses_of(target, aliases, order)


def _weights(said: Mapping[object, object]) -> dict[str, float]:
    weights = _numbers(said, "the weight", MAX_WEIGHT)
    if not any(weights.values()):
        raise CatalogError("at least one weight must be above 0, or nobody would answer")
    return weights


def _numbers(said: Mapping[object, object], what: str, most: float) -> dict[str, float]:
    if not 0 < len(said) <= MAX_TARGETS:
        raise CatalogError(f"must have 1 to {MAX_TARGETS} targets, found {len(said)}")
    numbers = {}
    for target, number in said.items():
        if not isinstance(target, str) or not target or target != target.strip():
            raise CatalogError(f"a target must be an address such as demo:sql, found {target!r}")
        if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number <= most:
            raise CatalogError(f"{what} of {target!r} must be a number from 0 to {most:g}, found {number!r}")
        numbers[target] = float(number)
    return numbers


def _check_circles(aliases: Aliases) -> None:
    try:
        TopologicalSorter({name: alias.weights for name, alias in aliases.items()}).prepare()
    except CycleError as error:
        raise CatalogError(f"aliases go in a circle: {' → '.join(reversed(error.args[1]))}") from None


DIGEST_BYTES = 8


def share_of(*words: str) -> float:
    """Return a number in [0, 1) that these words always give, in this order; other words give an independent one.

    For shares that grow: who was below the smaller share is below the larger one, too.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    for word in words:
        text = word.encode("utf-8", "surrogatepass")
        digest.update(len(text).to_bytes(8) + text)  # with its length, so that no bytes move from one to the next
    return (int.from_bytes(digest.digest()) >> 11) / 2**53


def in_order(weights: Mapping[str, float], *words: str) -> list[str]:
    """Return the variants as these words draw them: the first is theirs, each further one if those before it are gone.

    words: what is drawn for and who asks, such as an alias, a tenant and a `user`
    weights: finite, not negative; a variant of weight 0 is never drawn

    Over many words each variant comes first as often as its weight says. If weights change, nobody leaves a
    variant for one whose weight has grown less; the order of the mapping changes nothing. This is weighted
    rendezvous hashing: each variant has a draw of its own, and the least -ln(draw)/weight wins.
    """
    scores = {name: -math.log1p(-share_of(*words, name)) / weight for name, weight in weights.items() if weight > 0}
    return sorted(scores, key=lambda name: (scores[name], name))
