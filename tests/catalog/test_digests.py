"""Law: a digest that was kept is that of the file as it is, or the file is read again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_app.catalog import files
from serve_app.catalog.files import Digests, digest_of

CONTENT, OTHER = b"one" * 1000, b"two" * 1000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests are kept, at once."""
    monkeypatch.setattr(files, "SETTLED_S", 0.0)
    return tmp_path / "cache" / "digests"


def written(path: Path, content: bytes) -> None:
    """Write until the file system's clock has gone on."""
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:
        path.write_bytes(content)


def put_in_place(path: Path) -> None:
    path.with_suffix(".new").write_bytes(OTHER)
    path.with_suffix(".new").replace(path)


def with_old_times(path: Path) -> None:
    before = path.stat()
    written(path, OTHER)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_later_process_reads_no_file_that_is_as_it_was(
    path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Digests(place).of(path) == digest_of(path)
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert Digests(place).of(path) == hashlib.sha256(CONTENT).hexdigest()


@pytest.mark.parametrize("change", [lambda path: written(path, OTHER), put_in_place, with_old_times])
def test_a_file_that_has_changed_is_read_again(change: Callable[[Path], None], path: Path, place: Path) -> None:
    known = Digests(place)
    known.of(path)
    change(path)
    assert known.of(path) == Digests(place).of(path) == hashlib.sha256(OTHER).hexdigest()


def test_a_file_that_changed_just_now_is_not_remembered(
    path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SETTLED_S", 3600.0)
    Digests(place).of(path)
    assert not place.exists()


@pytest.mark.parametrize("kept", [b"", b"\xff\xfe", b"[1, 2]\n{}\n", b'["half'])
def test_a_damaged_file_of_digests_is_an_empty_one(kept: bytes, path: Path, place: Path) -> None:
    place.parent.mkdir()
    place.write_bytes(kept)
    assert Digests(place).of(path) == digest_of(path)
    place.unlink()
    place.mkdir()
    assert Digests(place).of(path) == digest_of(path)


def test_the_file_of_digests_is_bounded(path: Path, place: Path) -> None:
    place.parent.mkdir()
    place.write_bytes(b" " * (files.MAX_DIGESTS_BYTES + 1))
    Digests(place).of(path)
    assert place.stat().st_size < 1000


def test_half_a_line_of_another_process_harms_no_other_line(
    path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.parent.mkdir()
    place.write_bytes(b'["ab')
    digest = Digests(place).of(path)
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert Digests(place).of(path) == digest
