"""What is refused of tenants and keys themselves, told to whoever administers them."""

from __future__ import annotations


class TenancyError(Exception):
    """A whole sentence: what was asked, what was found, what is allowed."""
