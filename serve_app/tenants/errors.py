"""What is refused of tenants and keys themselves, told to whoever administers them."""

from __future__ import annotations


class TenancyError(Exception):
    """A whole sentence: what was asked, what was found, what is allowed."""


class NotThere(TenancyError):
    """There is no tenant or key of that name."""
