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
    keeps_prefix: keys and values are the base's whatever its scale (`engine/lora/registration.py`)
    """

    adapter: str
    version: str
    scale: float = 1.0
    keeps_prefix: bool = False

    @property
    def name(self) -> str:
        return self.adapter if self.scale == 1 else f"{self.adapter}*{self.scale!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """A base model and, where they are meant, the adapters on it, pinned to the versions of their files.

    adapter: the adapter's name below its base; None is the base itself; of a mix, its parts
    version: digest of the adapter's files; "" for the base; of a mix, a digest of its parts
    mix:     the parts of a mix in their one order, none twice, none of scale 0; of anything else ()
    prefix_version: of the model that has the same keys and values; None is this one alone
    """

    base: str
    adapter: str | None = None
    version: str = ""
    mix: tuple[Part, ...] = ()
    prefix_version: str | None = None

    @property
    def salt(self) -> str:
        """What besides tokens decides its keys and values; "" is the base's."""
        return self.version if self.prefix_version is None else self.prefix_version

    @property
    def name(self) -> str:
        """The address as clients write it."""
        return self.base if self.adapter is None else f"{self.base}:{self.adapter}"

    @property
    def pinned(self) -> str:
        """The address that means exactly this, whatever its name means later."""
        if self.adapter is None:
            return self.base
        pins = sorted(replace(part, adapter=f"{part.adapter}@{part.version}").name for part in self.parts)
        return f"{self.base}:{'+'.join(pins)}"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Every adapter that it is computed with."""
        if self.adapter is None:
            return ()
        return self.mix or (Part(adapter=self.adapter, version=self.version),)


def mixed(base: str, parts: Iterable[Part]) -> ModelRef:
    """Return the model that these adapters make together; the same mix, written differently, is the same model.

    Scales of one adapter add up; none left is the base, and one adapter alone at scale 1 is that adapter.
    """
    summed: dict[tuple[str, str], Part] = {}
    for part in parts:
        key = part.adapter, part.version
        known = summed.get(key)
        summed[key] = replace(part, scale=part.scale + (0.0 if known is None else known.scale))
    left = sorted((part for part in summed.values() if part.scale), key=lambda part: (part.version, part.adapter))
    if not left:
        return ModelRef(base=base)
    changing = [part for part in left if not part.keeps_prefix]
    prefix_version = mixed(base, changing).version if len(changing) < len(left) else None
    if len(left) == 1 and left[0].scale == 1:
        [part] = left
        return ModelRef(base=base, adapter=part.adapter, version=part.version, prefix_version=prefix_version)
    digest = sha256("\n".join(f"{part.version}*{part.scale!r}" for part in left).encode()).hexdigest()
    name = "+".join(sorted(part.name for part in left))
    version = digest[:NUM_VERSION_CHARS]
    return ModelRef(base=base, adapter=name, version=version, mix=tuple(left), prefix_version=prefix_version)
