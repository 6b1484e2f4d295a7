"""The folder in which a machine keeps adapters that it fetched: by digest, bounded, shared by all processes."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from serve_app.catalog.files import CatalogError

PLACE, BYTES = "SERVE_APP_ADAPTER_CACHE", "SERVE_APP_ADAPTER_CACHE_BYTES"
"""Variables of each machine's environment: the folder, and how large it may grow."""
DEFAULT_PLACE = "~/.cache/serve_app/adapters"
DEFAULT_BYTES = 20 * 2**30
LOCKS, DIGESTS = ".locks", ".digests"
UNFINISHED = "unfinished-"
NUM_KEY_DIGITS = 15
"""Hexadecimal digits of a digest that tell its lock from others."""
_OURS = re.compile(rf"[0-9a-f]{{32}}|{UNFINISHED}[0-9a-f]{{15}}")
_WHOLE, _FETCHING, _UNFINISHED = 1 << 62, 1 << 60, 1 << 61


class CacheFull(CatalogError):
    """There is no room: what is in use, or being fetched, is not removed."""


class AdapterCache:
    """One process's view of the folder. Any number of processes use the same; none of them needs to end well.

    Each version is a folder of its own, which appears whole, by a rename. Locks are byte ranges of one file, and the
    kernel drops those of a process that ends. A process holds a version that it may read; others do not remove that.

    One thread at a time uses an object. Nothing is opened or made before the first call.
    """

    def __init__(self, place: Path, max_bytes: int) -> None:
        self.place = place
        self.max_bytes = max_bytes
        self._descriptor: int | None = None
        self._held: set[str] = set()

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self:
        """Return what the environment names. Raises CatalogError for a size that is no number."""
        written = environ.get(BYTES, str(DEFAULT_BYTES))
        if not written.isdecimal():
            raise CatalogError(f"{BYTES} must be a number of bytes; found {written[:40]!r}")
        return cls(place_in(environ), int(written))

    def hold(self, version: str) -> Path | None:
        """Return the folder of a version and keep others from removing it; None if it is not there."""
        self._lock(_key(version), fcntl.F_RDLCK)
        folder = self.place / version
        if not folder.is_dir():
            self._lock(_key(version), fcntl.F_UNLCK)
            return None
        os.utime(folder)  # the least recently used is removed first
        self._held.add(version)
        return folder

    def release(self, version: str) -> None:
        """Let others remove a version, if this object holds it."""
        if version in self._held:
            self._held.discard(version)
            self._lock(_key(version), fcntl.F_UNLCK)

    def drop(self, version: str) -> None:
        """Remove a version, if it is there and nobody holds it."""
        folder = self.place / version
        if folder.is_dir():
            self._remove(folder)

    def close(self) -> None:
        """Release everything."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self._held.clear()

    @contextmanager
    def alone(self, version: str) -> Iterator[None]:
        """Wait until no other process fetches that version, and keep others from it."""
        self._lock(_FETCHING + _key(version), fcntl.F_WRLCK)
        try:
            yield
        finally:
            self._lock(_FETCHING + _key(version), fcntl.F_UNLCK)

    @contextmanager
    def unfinished(self) -> Iterator[Path]:
        """Make a folder to fetch into. It goes at the end, or when the next one fetches after this process died."""
        key = secrets.randbits(60)
        self._lock(_UNFINISHED + key, fcntl.F_WRLCK)
        folder = self.place / f"{UNFINISHED}{key:015x}"
        try:
            folder.mkdir(mode=0o700)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self._lock(_UNFINISHED + key, fcntl.F_UNLCK)

    def keep(self, unfinished: Path, version: str) -> Path:
        """Make a fetched folder the one of its version, unless there is one; hold and return it."""
        self._lock(_key(version), fcntl.F_RDLCK)
        folder = self.place / version
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise  # else it has been there already
        os.utime(folder)
        self._held.add(version)
        return folder

    def reserve(self, unfinished: Path, sizes: Mapping[str, int]) -> None:
        """Remove what was used least recently until files of these sizes have room, and take that room.

        Raises CacheFull, and OSError where the disk has none.
        """
        self._lock(_WHOLE, fcntl.F_WRLCK)
        try:
            self._make_room(sum(sizes.values()), beside=unfinished)
            for name, size in sizes.items():
                with (unfinished / name).open("xb") as file:
                    if size:
                        os.posix_fallocate(file.fileno(), 0, size)
        finally:
            self._lock(_WHOLE, fcntl.F_UNLCK)

    def _make_room(self, needed: int, *, beside: Path) -> None:
        kept: list[tuple[float, int, Path]] = []
        for folder in self.place.iterdir():
            is_unfinished = folder.name.startswith(UNFINISHED)
            if folder == beside or not _OURS.fullmatch(folder.name) or (is_unfinished and self._remove(folder)):
                continue
            with suppress(FileNotFoundError):  # its process has just finished with it
                size = sum(file.stat().st_size for file in folder.iterdir())
                kept.append((folder.stat().st_mtime, size, folder))
        taken = sum(size for _, size, _ in kept)
        for _, size, folder in sorted(kept):
            if taken + needed <= self.max_bytes:
                return
            if not folder.name.startswith(UNFINISHED) and folder.name not in self._held and self._remove(folder):
                taken -= size
        if taken + needed > self.max_bytes:
            raise CacheFull(
                f"the cache of adapters has no room for {needed} bytes: {taken} of {self.max_bytes} are in use. Set"
                f" {BYTES} on that machine to more, or withdraw adapters"
            )

    def _remove(self, folder: Path) -> bool:
        """Remove a folder that no process holds, and return whether it is gone."""
        is_unfinished = folder.name.startswith(UNFINISHED)
        key = _UNFINISHED + int(folder.name[len(UNFINISHED) :], 16) if is_unfinished else _key(folder.name)
        try:
            self._lock(key, fcntl.F_WRLCK, waits=False)
        except BlockingIOError:
            return False
        try:
            going = folder if is_unfinished else folder.rename(self.place / f"{UNFINISHED}{secrets.randbits(60):015x}")
            shutil.rmtree(going, ignore_errors=True)
            return True
        finally:
            self._lock(key, fcntl.F_UNLCK)

    def _lock(self, key: int, kind: int, *, waits: bool = True) -> None:
        """Lock one byte for this object; locks of an open file, unlike those of flock, may be as many as one likes."""
        if self._descriptor is None:
            self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(self.place / LOCKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        wanted = struct.pack("hhqqi", kind, os.SEEK_SET, key, 1, 0)
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK, wanted)


def place_in(environ: Mapping[str, str]) -> Path:
    """Return the folder that the environment names."""
    return Path(environ.get(PLACE) or DEFAULT_PLACE).expanduser()


def _key(version: str) -> int:
    return int(version[:NUM_KEY_DIGITS], 16)
