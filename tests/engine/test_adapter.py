"""Law: what moves into a slot is the version that was registered, whatever happened to its file since."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_app.engine.lora.adapter import WeightsFile
from serve_app.engine.lora.matching import AdapterRefused

CONTENT = bytes(range(256)) * 40
OTHER = CONTENT[::-1]
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def replace_atomically(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, path)


def write_in_place(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))  # not left to the clock's resolution


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(CONTENT)
    return path


CHANGES: dict[str, Callable[[Path], None]] = {
    "replaced": lambda path: replace_atomically(path, OTHER),
    "written over": lambda path: write_in_place(path, OTHER),
    "truncated": lambda path: os.truncate(path, 100),
    "longer": lambda path: path.write_bytes(CONTENT + b"x"),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.parametrize("was_read", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_has_changed_is_refused(change: str, was_read: bool, path: Path) -> None:
    file = WeightsFile(path, DIGEST)
    if was_read:
        assert file.read() == CONTENT
    CHANGES[change](path)
    for _ in range(2):
        with pytest.raises(AdapterRefused, match=r"has changed on disk|cannot be read any more"):
            file.read()


def test_a_change_that_keeps_size_and_times_is_seen_by_its_contents(path: Path) -> None:
    file = WeightsFile(path, DIGEST)
    file.read()
    status = path.stat()
    write_in_place(path, OTHER)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(AdapterRefused, match="its contents are others"):
        file.read()


def test_an_equal_file_in_its_place_is_the_same_version(path: Path) -> None:
    file = WeightsFile(path, DIGEST)
    file.read()
    replace_atomically(path, CONTENT)
    assert file.read() == CONTENT


def test_a_file_that_is_put_back_is_accepted_again(path: Path) -> None:
    file = WeightsFile(path, DIGEST)
    file.read()
    replace_atomically(path, OTHER)
    with pytest.raises(AdapterRefused):
        file.read()
    replace_atomically(path, CONTENT)
    assert file.read() == CONTENT
