"""The adapters that a fleet has published: how the set changes, and the file that keeps it where there is no store."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from serve_app.core.adapters import AdapterSet, Canary, PublishedAdapter
from serve_app.core.errors import AdapterNotFound, InvalidRequest, Unavailable
from serve_app.tenants.errors import StoreUnavailable

DEFAULT_FILE = "serve_app.adapters.json"
FORM = 1
"""Of the file; one of another form is refused."""
MAX_FILE_BYTES = 64 * 2**20
MAX_PUBLISHED = 10_000
MAX_WITHDRAWN = 10_000
"""Names that are remembered as withdrawn; the oldest are forgotten first."""

Action = Literal["publish", "withdraw", "roll back", "widen", "hold"]
"""To hold a canary is to tell that it waits; what is published stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of what is published.

    version, path: of what is published; for a canary that is widened or rolled back, its version
    share:    of the requests that a canary gets from now on, 1 is all; None publishes no canary
    tried:    the share that a canary which is widened must have; else another router has widened it already
    reason:   why the service changes it by itself, in words; "" for what somebody asked for
    served:   version and folder that the name meant, where it is served without having been published
    in_place: whether what the name means may be replaced
    by, at:   the tenant, or "operator", and Unix seconds
    actor:    the id of the key that asks; "" where none was asked for
    seen:     the highest revision that any replica has applied; the new one is higher
    revision: of the set that the change was decided on, if it is to fail on any other one
    """

    action: Action
    base: str
    name: str
    version: str = ""
    path: str = ""
    share: float | None = None
    tried: float | None = None
    reason: str = ""
    served: tuple[str, str] | None = None
    in_place: bool = False
    by: str = "operator"
    actor: str = ""
    at: float = 0.0
    seen: int = 0
    revision: int | None = None

    @property
    def address(self) -> str:
        return f"{self.base}:{self.name}"


def changed(published: AdapterSet, change: Change) -> AdapterSet:
    """Return the set after a change, at a new revision; the same set if nothing differs.

    Raises InvalidRequest, AdapterNotFound where the name means nothing, Unavailable if another change came first.
    """
    if change.revision not in {None, published.revision}:
        raise Unavailable("Something else was published meanwhile; retry.", None, {"retry_after_s": 1})
    current = published.find(change.base, change.name)
    others = tuple(each for each in published.adapters if each is not current)
    key = (change.base, change.name)
    withdrawn = tuple(each for each in published.withdrawn if each != key)
    if change.action == "withdraw":
        if current is None and change.served is None:
            raise _not_found(change)
        return _next(published, change, others, (*withdrawn, key)[-MAX_WITHDRAWN:])
    if change.action == "publish":
        new = _published(current, change)
    elif current is None:
        raise _not_found(change)
    else:
        new = _ways[change.action](current, change)
    if new == current:
        return published
    if len(others) >= MAX_PUBLISHED:
        must = f"be published beside at most {MAX_PUBLISHED - 1} others: withdraw some"
        raise InvalidRequest.refusing("lora_name", must=must, found=str(len(others)))
    return _next(published, change, (*others, new), withdrawn)


def _published(current: PublishedAdapter | None, change: Change) -> PublishedAdapter:
    """Return the adapter in the version of the change; a canary that runs has ended."""
    if change.share is not None:
        return _tried(current, change, share=change.share)
    meant = change.served if current is None else (current.version, current.path)
    if meant is not None and not change.in_place:
        raise InvalidRequest.refusing(
            "lora_name",
            must="be a name that is not served yet",
            found=f"'{change.address}', which has already been loaded",
            remedy='To replace what it means, send "load_inplace": true.',
        )
    if current is not None and current.version == change.version:
        return replace(current, path=change.path, canary=None)
    return _as_published(change, (change.version, change.path), meant)


def _tried(current: PublishedAdapter | None, change: Change, *, share: float) -> PublishedAdapter:
    """Return the adapter with a canary, or with another share for the canary that it has."""
    if current is None and change.served is not None:
        current = _as_published(change, change.served, None)
    if current is None or current.version == change.version:
        found = "a name that is not served yet" if current is None else "the version that the name means already"
        raise InvalidRequest.refusing("canary", must="be absent for what cannot be compared", found=found)
    if current.path == change.path:
        must = "be another folder than that of the version that is served"
        raise InvalidRequest.refusing("lora_path", must=must, found="that one")
    if current.canary is not None and current.canary.version != change.version:
        raise InvalidRequest.refusing(
            "canary",
            must="wait until the canary of the name has ended",
            found=f"one, of version {current.canary.version[:12]}",
            remedy="Roll it back, or publish in place.",
        )
    canary = Canary(version=change.version, path=change.path, share=share, since=change.at, by=change.by)
    return replace(current, canary=canary)


def _widened(current: PublishedAdapter, change: Change) -> PublishedAdapter:
    """Return the adapter with a larger share for its canary; with all of it, the canary is what the name means."""
    canary, share = current.canary, change.share
    if canary is None or share is None or (canary.version, canary.share) != (change.version, change.tried):
        return current  # it has ended, or another router was first
    if share >= 1:
        ended = replace(change, by=canary.by)
        return _as_published(ended, (canary.version, canary.path), (current.version, current.path))
    return replace(current, canary=replace(canary, share=share, since=change.at))


def _rolled_back(current: PublishedAdapter, change: Change) -> PublishedAdapter:
    """Return the adapter without its canary; if it has none, in the version that it had before."""
    if change.version and (current.canary is None or current.canary.version != change.version):
        return current  # it has ended
    if current.canary is not None:
        return replace(current, canary=None)
    if current.previous is None:
        must = "name an adapter that meant another version before"
        raise InvalidRequest.refusing("lora_name", must=must, found=f"'{change.address}', which has one version only")
    return _as_published(change, current.previous, (current.version, current.path))


_ways: Mapping[str, Callable[[PublishedAdapter, Change], PublishedAdapter]] = MappingProxyType(
    {"roll back": _rolled_back, "widen": _widened, "hold": lambda current, change: current}
)


def _as_published(change: Change, new: tuple[str, str], before: tuple[str, str] | None) -> PublishedAdapter:
    return PublishedAdapter(
        base=change.base,
        name=change.name,
        version=new[0],
        path=new[1],
        previous=None if before is None or before[0] == new[0] else before,
        published_at=change.at,
        by=change.by,
    )


def _next(
    published: AdapterSet,
    change: Change,
    adapters: tuple[PublishedAdapter, ...],
    withdrawn: tuple[tuple[str, str], ...],
) -> AdapterSet:
    return AdapterSet(
        revision=max(published.revision, change.seen) + 1,
        adapters=tuple(sorted(adapters, key=attrgetter("base", "name"))),
        withdrawn=withdrawn,
    )


def _not_found(change: Change) -> AdapterNotFound:
    must = "name an adapter that is served"
    return AdapterNotFound.refusing("lora_name", must=must, found=f"'{change.address}', which cannot be found")


class PublishedFile:
    """The set in a file of JSON, which several processes of one machine read and change.

    A change is whole or not at all, whatever ends in the middle of it: 1. lock; 2. read; 3. write a new file and sync
    it; 4. rename it over the old one and sync the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def mark(self) -> tuple[int, ...]:
        """Return what tells the file's content from another one; () where there is no file."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self) -> AdapterSet:
        """Return the set, an empty one if there is no file. Raises StoreUnavailable for a damaged file."""
        try:
            with self._path.open("rb") as file:
                written = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return AdapterSet()
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            if len(written) > MAX_FILE_BYTES:
                raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
            return _read(json.loads(written))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._unreadable(error) from error

    def change(self, change: Change) -> AdapterSet:
        """Carry out a change, and return the set after it. Raises as `changed`, and StoreUnavailable."""
        try:
            with self._locked():
                before = self.read()
                after = changed(before, change)
                if after is not before:
                    self._write(after)
                return after
        except OSError as error:
            message = f"{self._path.name}, the file of published adapters, cannot be written: {error.strerror}"
            raise StoreUnavailable(f"{message} ({self._path.resolve()}).", f"{message}.") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._path.with_name(f".{self._path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write(self, published: AdapterSet) -> None:
        folder = self._path.resolve().parent
        descriptor, name = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=folder)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"form": FORM, **_written(published)}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self._path)
        except BaseException:
            os.unlink(name)
            raise
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)

    def _unreadable(self, error: Exception) -> StoreUnavailable:
        message = f"{self._path.name}, the file of published adapters, cannot be read"
        remedy = "Bring it back from a copy, or remove it: then folders are served as they lie on disk"
        return StoreUnavailable(f"{message}: {error}. {remedy} ({self._path.resolve()}).", f"{message}.")


def _written(published: AdapterSet) -> dict[str, Any]:
    """Return the set as it is written, without canaries that are none: earlier versions cannot read them."""
    written = asdict(published)
    for each in written["adapters"]:
        if each["canary"] is None:
            del each["canary"]
    return written


def _read(content: Any) -> AdapterSet:
    """Return the set that was written. Raises ValueError, TypeError, KeyError for anything else."""
    if content["form"] != FORM:
        raise ValueError(f"it has form {str(content['form'])[:20]!r}; this version reads {FORM}")
    adapters = tuple(map(_adapter, content["adapters"]))
    withdrawn = tuple(map(_pair, content["withdrawn"]))
    return AdapterSet(revision=int(content["revision"]), adapters=adapters, withdrawn=withdrawn)


def _adapter(written: Any) -> PublishedAdapter:
    previous, canary = written["previous"], written.get("canary")
    read = {
        "previous": None if previous is None else _pair(previous),
        "canary": None if canary is None else Canary(**canary),
    }
    return PublishedAdapter(**{**written, **read})


def _pair(written: Any) -> tuple[str, str]:
    first, second = written
    return str(first), str(second)
