"""Adapters as the fleet has published them: which version of which folder each name means."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A version that answers a share of an adapter's requests while it is compared with the published version.

    version, path: digest of its files, and its folder
    share: of the requests that name the adapter without a version, above 0 and below 1
    since: Unix seconds from which it has this share
    by:    who published it, the tenant or "operator"
    """

    version: str
    path: str
    share: float
    since: float = 0.0
    by: str = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedAdapter:
    """One adapter that was published under a name.

    base, name:   the base model, and what follows the colon of its address
    version:      digest of its files, as of `AdapterRecord`
    path:         its folder, absolute and without links
    previous:     the version that this name meant before, and its folder; None if there was none
    published_at: Unix seconds
    by:           the tenant, or "operator"
    canary:       a version that is tried beside this one; None if there is none
    """

    base: str
    name: str
    version: str
    path: str
    previous: tuple[str, str] | None = None
    published_at: float = 0.0
    by: str = "operator"
    canary: Canary | None = None

    @property
    def address(self) -> str:
        """The address as clients write it."""
        return f"{self.base}:{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSet:
    """All adapters that are published, of every base, at one revision.

    revision:  grows with every change; 0 if nothing was ever published
    withdrawn: base and name of what is no longer served, even if a folder of that name lies on disk

    A published name hides a folder of the same name. Other folders are served as they lie on disk.
    """

    revision: int = 0
    adapters: tuple[PublishedAdapter, ...] = ()
    withdrawn: tuple[tuple[str, str], ...] = ()

    def of(self, base: str) -> tuple[PublishedAdapter, ...]:
        """Return the published adapters of one base."""
        return tuple(each for each in self.adapters if each.base == base)

    def withdrawn_of(self, base: str) -> frozenset[str]:
        """Return the names that are withdrawn from one base."""
        return frozenset(name for each, name in self.withdrawn if each == base)

    def find(self, base: str, name: str) -> PublishedAdapter | None:
        """Return what the name means on that base; None if it is not published."""
        return next((each for each in self.adapters if (each.base, each.name) == (base, name)), None)


NOTHING_PUBLISHED = AdapterSet()
