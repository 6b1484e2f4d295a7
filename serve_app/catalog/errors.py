"""What the catalog raises where files or settings are refused."""

from __future__ import annotations


class CatalogError(ValueError):
    """A model folder, an adapter or a setting is refused; the message is a reason that an operator can act on."""
