"""What is refused of tenants and keys themselves, told to whoever administers them."""

from __future__ import annotations


class TenancyError(Exception):
    """A whole sentence: what was asked, what was found, what is allowed."""


class NotThere(TenancyError):
    """There is no tenant or key of that name."""


def unopened(error: Exception) -> TenancyError:
    """What the driver says, without the statement and the address, which may hold a password."""
    reason = str(getattr(error, "orig", None) or type(error).__name__).strip().splitlines()[0].rstrip(".")
    return TenancyError(f"The store of tenants cannot be opened: {reason}.")
