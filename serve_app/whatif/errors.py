"""What keeps a simulation from being made."""

from __future__ import annotations


class Unusable(Exception):
    """A file or a case cannot be simulated; the message is for a person."""
