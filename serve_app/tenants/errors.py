"""What is refused of tenants and keys themselves, told to whoever administers them."""

from __future__ import annotations

LOCKED = "database is locked"
"""The one reason of a driver that clients are told."""


class TenancyError(Exception):
    """A whole sentence: what was asked, what was found, what is allowed."""


class NotThere(TenancyError):
    """There is no tenant or key of that name."""


class StoreUnavailable(TenancyError):
    """The database did not do what was asked; it may be locked, full or gone.

    shown: the message for clients. A driver's own words name the database's address, its user and its files.
    """

    def __init__(self, message: str, shown: str) -> None:
        super().__init__(message)
        self.shown = shown


def unopened(error: Exception) -> TenancyError:
    """No store is there to be asked."""
    return TenancyError(f"The store of tenants cannot be opened: {_reason(error)}.")


def unavailable(error: Exception) -> StoreUnavailable:
    """The store was opened, and fails now."""
    what = "The store of tenants did not do what was asked"
    reason = _reason(error)
    return StoreUnavailable(f"{what}: {reason}.", f"{what}: {LOCKED}." if reason == LOCKED else f"{what}; retry.")


def _reason(error: Exception) -> str:
    """What the driver says, without the statement and the address, which may hold a password."""
    said = str(getattr(error, "orig", None) or type(error).__name__).strip()
    return said.splitlines()[0].rstrip(".") if said else type(error).__name__
