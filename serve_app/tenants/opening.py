"""Opens the store with its pepper, as the service and the command line do alike, and copies it."""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from serve_app.tenants.errors import TenancyError
from serve_app.tenants.pepper import make_pepper, read_pepper
from serve_app.tenants.store import TenantStore, engine_of, file_of

logger = logging.getLogger(__name__)

OURS_ALONE = 0o600


def open_store(
    url: str, *, pepper_file: Path, environment: str | None, begins: bool = True
) -> tuple[TenantStore, bytes]:
    """Return the store and the pepper of its keys.

    environment: the pepper where it is not in a file
    begins:      whether both are made where there is neither yet
    Raises TenancyError, also where the store has keys that another pepper made.
    """
    file = file_of(engine_of(url).url)
    if file is not None and not file.exists():
        if not begins:
            raise missing(file)
        _make_private(file)
        logger.info("a new store of tenants begins: %s", file.resolve())
    store = TenantStore(url, is_made=begins or file is not None)
    if environment is None and not store.has_pepper:
        make_pepper(pepper_file)
    pepper = read_pepper(pepper_file, environment)
    store.use_pepper(pepper)
    return store, pepper


def copy_store(url: str, target: Path) -> Path:
    """Copy the store into a new file, as it is at one moment, whoever has it open; return the file that was copied.

    Raises TenancyError.
    """
    file = file_of(engine_of(url).url)
    if file is None:
        raise TenancyError("The store is no file of SQLite; copy it by its database's own tools, such as pg_dump.")
    if not file.exists():
        raise missing(file)
    try:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OURS_ALONE))
    except FileExistsError as error:
        raise TenancyError(f"{target} is there already; name a new file.") from error
    try:
        with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(target)) as copy:
            source.backup(copy)
    except sqlite3.Error as error:
        target.unlink()
        raise TenancyError(f"{file} cannot be copied to {target}: {error}.") from error
    return file


def missing(file: Path) -> TenancyError:
    """Return the refusal of a store that is not where it should be."""
    return TenancyError(
        f"There is no store of tenants at {file.resolve()}: it was moved, or the service was started in another folder."
        " Put it back, or run this there; `serve_app keys create --admin` begins a new one."
    )


def _make_private(file: Path) -> None:
    """A file of SQLite is its owner's alone, and those that it writes beside it are as it is."""
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OURS_ALONE))
    except OSError:
        return  # another was sooner, or opening it says why not
