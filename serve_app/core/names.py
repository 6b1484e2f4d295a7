"""How a model is addressed: `base` or `base:adapter`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """A base model and, where one is meant, the adapter on it, pinned to the version of its files.

    adapter: the adapter's name below its base; None is the base itself
    version: digest of the adapter's files; "" for the base
    """

    base: str
    adapter: str | None = None
    version: str = ""

    @property
    def name(self) -> str:
        """The address as clients write it."""
        return self.base if self.adapter is None else f"{self.base}:{self.adapter}"
