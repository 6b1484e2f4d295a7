"""An adapter's weights on disk, held to what they were when they were first seen."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from serve_app.engine.lora.errors import AdapterRefused

MAX_READ_BYTES = 1 << 30


class WeightsFile:
    """A file that is read again each time its adapter moves in, and must not have changed meanwhile.

    It is copied by plain reads, never mapped: a mapped file that somebody truncates ends the process (SIGBUS), a
    short read is an error like any other. The first whole read fixes a digest of the contents, and every later read
    must give the same; what the file system says of the file decides only until then. So an operator may

    - replace the file by an equal one (another inode, other times): nothing happens;
    - replace it by another, atomically or in place: the adapter keeps its slot while it has one, and what moves in
      afterwards fails with a reason, until the adapter is registered anew under its new version;
    - truncate or remove it: the same.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = _stamp(path.stat())
        self._digest: bytes | None = None

    def read(self) -> bytes:
        """Give the contents. Raises AdapterRefused where they are not those of the registered version."""
        try:
            data, is_steady = self._read_all()
        except OSError as error:
            raise AdapterRefused(f"{self.path.name} cannot be read any more: {error}") from error
        digest = hashlib.sha256(data).digest()
        if self._digest is None and is_steady:
            self._digest = digest
        if digest != self._digest:
            raise self._changed("its contents are others")
        return data

    def _read_all(self) -> tuple[bytes, bool]:
        """The contents, and whether the file was all the while as it was when first seen."""
        handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            before = _stamp(os.fstat(handle))
            num_bytes = self._stamp[0]
            if before[0] != num_bytes:
                raise self._changed(f"it has {before[0]} bytes, not {num_bytes}")
            chunks: list[bytes] = []
            done = 0
            while done < num_bytes:
                chunk = os.pread(handle, min(num_bytes - done, MAX_READ_BYTES), done)
                if not chunk:
                    raise self._changed(f"it ended after {done} of {num_bytes} bytes")
                chunks.append(chunk)
                done += len(chunk)
            data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            return data, self._stamp == before == _stamp(os.fstat(handle))
        finally:
            os.close(handle)

    def _changed(self, how: str) -> AdapterRefused:
        return AdapterRefused(f"{self.path.name} has changed on disk since the adapter was registered: {how}")


def _stamp(status: os.stat_result) -> tuple[int, int, int, int]:
    """Size, time of the last change, and identity of a file."""
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino
