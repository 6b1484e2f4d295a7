"""Opens the store with its pepper, as the service and the command line do alike."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from serve_app.tenants.pepper import make_pepper, read_pepper
from serve_app.tenants.store import TenantStore


def open_store(url: str, *, pepper_file: Path, environment: str | None) -> tuple[TenantStore, bytes]:
    """The store and the pepper of its keys. Both are made where there is neither yet.

    environment: the pepper where it is not in a file
    Raises TenancyError, also where the store has keys that another pepper made.
    """
    _make_private(url)
    store = TenantStore(url)
    if environment is None and not store.has_pepper:
        make_pepper(pepper_file)
    pepper = read_pepper(pepper_file, environment)
    store.use_pepper(pepper)
    return store, pepper


def _make_private(url: str) -> None:
    """A file of SQLite is its owner's alone, and those that it writes beside it are as it is."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        return  # opening it says so
    if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        return
    try:
        os.close(os.open(str(parsed.database), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        return  # it is there, or opening it says why not
