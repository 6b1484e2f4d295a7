"""How an adapter is turned down."""

from __future__ import annotations


class AdapterRefused(ValueError):
    """The adapter does not fit the model or needs what the engine does not carry out; the message says what."""
