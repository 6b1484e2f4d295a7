"""What is refused of tenants and keys themselves, told to whoever administers them."""

from __future__ import annotations


class TenancyError(Exception):
    """A whole sentence: what was asked, what was found, what is allowed."""


class NotThere(TenancyError):
    """There is no tenant or key of that name."""


class StoreUnavailable(TenancyError):
    """The database did not do what was asked; it may be locked, full or gone."""


def unopened(error: Exception) -> TenancyError:
    """No store is there to be asked."""
    return TenancyError(f"The store of tenants cannot be opened: {_reason(error)}.")


def unavailable(error: Exception) -> StoreUnavailable:
    """The store was opened, and fails now."""
    return StoreUnavailable(f"The store of tenants did not do what was asked: {_reason(error)}.")


def _reason(error: Exception) -> str:
    """What the driver says, without the statement and the address, which may hold a password."""
    said = str(getattr(error, "orig", None) or type(error).__name__).strip()
    return said.splitlines()[0].rstrip(".") if said else type(error).__name__
