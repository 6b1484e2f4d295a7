"""Opens the store with its pepper, as the service and the command line do alike, and copies it."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from serve_app.core.tenants import Tenant
from serve_app.tenants.errors import TenancyError
from serve_app.tenants.keys import DEFAULT_PEPPER, fingerprint_of, make_pepper, read_pepper
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
    if environment is None and not store.pepper:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PepperState:
    """Where the pepper is, and whether it is the right one.

    source:  `environment`, `file` or `none`; file: where it is, or would be
    mode:    permission bits of its file; None where it is none
    problem: why it opens no door; None where it does, or where no store can tell
    """

    source: str
    file: str = DEFAULT_PEPPER
    mode: int | None = None
    is_beside_store: bool = False
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a store and its pepper are like.

    shown:        its address without a password
    has_password: whether its address has one
    problem:      why it cannot be read; None where it can
    journal_mode: SQLite's; None of another database
    mode:         permission bits of the files of SQLite, taken together; None of another database
    """

    shown: str
    backend: str
    has_password: bool = False
    problem: str | None = None
    journal_mode: str | None = None
    mode: int | None = None
    file: Path | None = None
    pepper: PepperState
    tenants: Sequence[Tenant] = ()


def inspect_store(url: str, *, pepper_file: Path, environment: str | None) -> Inspection:
    """Raises nothing: what is wrong is in the answer.

    environment: the pepper where it is not in a file
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        nowhere = PepperState(source="none")
        return Inspection(shown="(no URL)", backend="", problem="the URL of the store cannot be read", pepper=nowhere)
    file = file_of(parsed)
    seen = Inspection(
        shown=parsed.render_as_string(hide_password=True),
        backend=parsed.get_backend_name(),
        has_password=parsed.password is not None,
        file=file,
        pepper=_pepper_state(pepper_file, environment, file),
    )
    if file is not None and not file.is_file():
        return replace(seen, problem=f"there is no file {file}")
    try:
        return _read(url, seen, pepper_file, environment)
    except (TenancyError, SQLAlchemyError, sqlite3.Error) as error:
        reason = str(error) if isinstance(error, TenancyError) else type(error).__name__
        return replace(seen, problem=reason.rstrip("."))


def _read(url: str, seen: Inspection, pepper_file: Path, environment: str | None) -> Inspection:
    journal_mode = None if seen.file is None else _journal_mode(seen.file)
    store = TenantStore(url, is_made=False)
    try:
        return replace(
            seen,
            journal_mode=journal_mode,
            mode=None if seen.file is None else _mode_of(seen.file),
            pepper=replace(seen.pepper, problem=_problem_of(store, pepper_file, environment)),
            tenants=store.tenants(),
        )
    finally:
        store.close()


def _problem_of(store: TenantStore, pepper_file: Path, environment: str | None) -> str | None:
    if not store.pepper:
        return None
    try:
        is_right = store.pepper == fingerprint_of(read_pepper(pepper_file, environment))
    except TenancyError as error:
        return str(error).rstrip(".")
    return None if is_right else "it is not the one that the keys of the store were made under"


def _pepper_state(file: Path, environment: str | None, store: Path | None) -> PepperState:
    if environment is not None:
        return PepperState(source="environment", file=str(file))
    if not file.is_file():
        return PepperState(source="none", file=str(file))
    is_beside = store is not None and store.resolve().parent == file.resolve().parent
    mode = stat.S_IMODE(file.stat().st_mode)
    return PepperState(source="file", file=str(file), mode=mode, is_beside_store=is_beside)


def _journal_mode(file: Path) -> str:
    with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        return str(connection.execute("PRAGMA journal_mode").fetchone()[0])


def _mode_of(file: Path) -> int:
    """What anybody may do with the database, or with what SQLite writes beside it."""
    beside = (file.with_name(file.name + end) for end in ("", "-wal", "-shm"))
    return reduce(or_, (stat.S_IMODE(each.stat().st_mode) for each in beside if each.exists()), 0)
