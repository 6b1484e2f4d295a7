"""Digests of files by what the file system says of them, so that a process that starts reads large ones not again."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

SETTLED_S = 2.0
"""A file that changed less than so long ago may change again without another time: it is read the next time, too."""
MAX_BYTES = 8 << 20
"""Of the file of digests, about 50,000 of them; a larger one is begun anew."""
Stamp = tuple[int, ...]


class Digests:
    """The digests of files of this machine. A later process finds those of an earlier one.

    A digest counts while size, time of the last change of contents and of anything else, and identity are the same.
    Whoever sets times by hand changes the last but one. Several processes may append to the file at once.

    place: the file that keeps them; what is wrong with it is as if it were empty
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._found: dict[Stamp, str] | None = None

    def of(self, path: Path) -> str:
        """Return the SHA-256 of a file's contents, in hexadecimal digits. Raises OSError."""
        if self._found is None:
            self._found = self._read()
        with path.open("rb") as file:
            stamp = _stamp(os.fstat(file.fileno()))
            if stamp in self._found:
                return self._found[stamp]
            begun_ns = time.time_ns()
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            is_steady = stamp == _stamp(os.fstat(file.fileno()))
        if is_steady and begun_ns - max(stamp[:2]) > SETTLED_S * 1e9:
            self._found[stamp] = digest
            with suppress(OSError):
                self._place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with self._place.open("a") as kept:
                    kept.write("\n" + json.dumps([digest, *stamp]))  # another's half line ends before it
        return digest

    def _read(self) -> dict[Stamp, str]:
        found: dict[Stamp, str] = {}
        with suppress(OSError):
            if self._place.stat().st_size > MAX_BYTES:
                self._place.unlink()
            for line in self._place.read_text(errors="replace").splitlines():
                with suppress(ValueError, TypeError):
                    digest, *stamp = json.loads(line)
                    found[tuple(stamp)] = bytes.fromhex(digest).hex()
        return found


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file's contents, which are read, in hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_dev, status.st_ino
