"""What is refused of tenants and keys themselves, told to whoever administers them."""

from __future__ import annotations

DRIVER = "psycopg"
INSTALL = "`pip install -c constraints.txt -e '.[postgresql]'` installs it"
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
    """No store is there to be asked; where its driver is missing, how to install it."""
    from sqlalchemy.exc import ArgumentError  # imported here: a router knows these errors, and no database

    match error:
        case ImportError():
            reason = _without_driver(error.name or DRIVER)
        case ArgumentError():
            reason = f"allowed are `sqlite:///FILE` and `postgresql+{DRIVER}://user@host/name`; found another URL"
        case _:
            reason = _reason(error)
    return TenancyError(f"The store of tenants cannot be opened: {reason}.")


def unavailable(error: Exception) -> StoreUnavailable:
    """The store was opened, and fails now."""
    what = "The store of tenants did not do what was asked"
    reason = _reason(error)
    return StoreUnavailable(f"{what}: {reason}.", f"{what}: {LOCKED}." if reason == LOCKED else f"{what}; retry.")


def _without_driver(module: str) -> str:
    if module == DRIVER:
        return f"its driver, {DRIVER}, is not installed; {INSTALL}"
    return f"the driver {module} is not installed; for PostgreSQL write `postgresql+{DRIVER}://…`, and {INSTALL}"


def _reason(error: Exception) -> str:
    """What the driver says, without the statement and the address, which may hold a password."""
    said = str(getattr(error, "orig", None) or type(error).__name__).strip()
    return said.splitlines()[0].rstrip(".") if said else type(error).__name__
