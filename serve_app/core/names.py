"""How a model is addressed: `base`, `base:adapter`, or a mix of adapters, `base:a*0.7+b*0.3`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256

MAX_MIXED_ADAPTERS = 8
"""In one mix, however many fit at once."""
MAX_SCALE = 100
"""Of one part of a mix, either way."""
NUM_VERSION_CHARS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One adapter of a model, and how much of it.

    version: digest of its files
    scale:   what it adds to a module's output is multiplied by it
    """

    adapter: str
    version: str
    scale: float = 1.0

    @property
    def name(self) -> str:
        return self.adapter if self.scale == 1 else f"{self.adapter}*{self.scale!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """A base model and, where they are meant, the adapters on it, pinned to the versions of their files.

    adapter: the adapter's name below its base; None is the base itself; of a mix, its parts
    version: digest of the adapter's files; "" for the base; of a mix, a digest of its parts
    mix:     the parts of a mix in their one order, none twice, none of scale 0; of anything else ()
    """

    base: str
    adapter: str | None = None
    version: str = ""
    mix: tuple[Part, ...] = ()

    @property
    def name(self) -> str:
        """The address as clients write it."""
        return self.base if self.adapter is None else f"{self.base}:{self.adapter}"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Every adapter that it is computed with."""
        if self.adapter is None:
            return ()
        return self.mix or (Part(adapter=self.adapter, version=self.version),)


def mixed(base: str, parts: Iterable[Part]) -> ModelRef:
    """The model that these adapters make together, the same one however the same mix was written.

    Scales of one adapter add up; none left is the base, and one adapter alone at scale 1 is that adapter.
    """
    summed: dict[str, Part] = {}
    for part in parts:
        known = summed.get(part.adapter)
        summed[part.adapter] = replace(part, scale=part.scale + (0.0 if known is None else known.scale))
    left = sorted((part for part in summed.values() if part.scale), key=lambda part: (part.version, part.adapter))
    if not left:
        return ModelRef(base=base)
    if len(left) == 1 and left[0].scale == 1:
        return ModelRef(base=base, adapter=left[0].adapter, version=left[0].version)
    digest = sha256("\n".join(f"{part.version}*{part.scale!r}" for part in left).encode()).hexdigest()
    name = "+".join(sorted(part.name for part in left))
    return ModelRef(base=base, adapter=name, version=digest[:NUM_VERSION_CHARS], mix=tuple(left))
