"""Law: what lies in huge pages is what it was, no byte of memory more, and nothing that was to have small pages."""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
from pathlib import Path

import pytest

from serve_app.engine.decoder import memory as huge_pages
from serve_app.engine.decoder.memory import HUGE, MADV_COLLAPSE, RULE, SMALL, lay_in_huge_pages

pytestmark = pytest.mark.skipif(not RULE.exists(), reason="this system has no huge pages")


class Area:
    """Memory of its own; begin and end: of what huge pages of it are."""

    def __init__(self, num_huge: int) -> None:
        self.memory = mmap.mmap(-1, (num_huge + 1) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_DONTFORK)  # so it is one mapping with no neighbour
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.begin = -(-address // HUGE) * HUGE
        self.end = self.begin + num_huge * HUGE
        self.offset = self.begin - address

    def fill(self, first: int, count: int) -> None:
        """Every small page of so many huge ones."""
        for at in range(self.offset + first * HUGE, self.offset + (first + count) * HUGE, SMALL):
            self.memory[at : at + 8] = at.to_bytes(8, "little")

    def holds(self, first: int, count: int) -> bool:
        places = range(self.offset + first * HUGE, self.offset + (first + count) * HUGE, SMALL)
        return all(self.memory[at : at + 8] == at.to_bytes(8, "little") for at in places)

    def told(self, word: str) -> int:
        """Bytes that the system tells of the mappings between, by that word."""
        total, is_inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            head, *rest = line.split()
            if "-" in head and len(rest) >= 4:
                first, last = (int(each, 16) for each in head.split("-"))
                is_inside = first < self.end and self.begin < last
            elif is_inside and head == f"{word}:":
                total += int(rest[0]) << 10
        return total


@pytest.fixture(autouse=True)
def _allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule(tmp_path, monkeypatch, "always [madvise] never\n")


def rule(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (folder / "enabled").write_text(text)
    monkeypatch.setattr(huge_pages, "RULE", folder / "enabled")


@pytest.fixture
def area() -> Area:
    return Area(12)


class Asked:
    """What was advised within an area; the rest of the process is left alone."""

    def __init__(self, area: Area, error: int = 0, *, is_real: bool = False) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self._area, self._error, self._is_real = area, error, is_real

    def __call__(self, at: int, size: int, advice: int) -> int:
        if not self._area.begin <= at < self._area.end:
            return errno.ENOMEM
        self.calls.append(((at - self._area.begin) // HUGE, size // HUGE, advice))
        if self._is_real:
            return huge_pages._madvise(at, size, advice)
        return self._error if advice == MADV_COLLAPSE else 0

    @property
    def places(self) -> set[int]:
        return {first + each for first, count, _ in self.calls for each in range(count)}


def test_what_is_laid_is_what_it_was_though_it_is_read_meanwhile(area: Area) -> None:
    area.fill(0, 12)
    before, wrong, is_over = area.told("Rss"), [], threading.Event()

    def read() -> None:
        while not is_over.is_set():
            wrong.extend([] if area.holds(0, 12) else [1])

    reader = threading.Thread(target=read)
    reader.start()
    asked = Asked(area, is_real=True)
    count = lay_in_huge_pages(advise=asked)
    is_over.set()
    reader.join()
    assert asked.places == set(range(12))
    assert area.holds(0, 12)
    assert not wrong
    assert area.told("Rss") == before
    if asked.calls[0][2] == asked.calls[-1][2] == MADV_COLLAPSE:  # of a kernel that can
        assert area.told("AnonHugePages") == count
        assert count, "there was room for some"


def test_only_what_is_all_there_is_laid(area: Area) -> None:
    area.fill(0, 3)
    area.memory[area.offset + 4 * HUGE] = 1
    area.fill(5, 6)
    asked = Asked(area)
    assert lay_in_huge_pages(advise=asked) == 9 * HUGE
    assert asked.places == {0, 1, 2, *range(5, 11)}


def test_what_was_to_have_small_pages_keeps_them(area: Area) -> None:
    area.fill(0, 12)
    area.memory.madvise(mmap.MADV_NOHUGEPAGE)
    asked = Asked(area)
    assert lay_in_huge_pages(advise=asked) == 0
    assert asked.calls == []


def test_an_older_kernel_is_asked_to_do_it_by_and_by(area: Area) -> None:
    area.fill(0, 12)
    asked = Asked(area, errno.EINVAL)
    assert lay_in_huge_pages(advise=asked) == 12 * HUGE
    assert [advice for *_, advice in asked.calls[1:]] == [mmap.MADV_HUGEPAGE] * (len(asked.calls) - 1)


def test_where_there_is_no_room_the_next_ones_are_tried(area: Area) -> None:
    area.fill(0, 12)
    asked = Asked(area, errno.ENOMEM)
    assert lay_in_huge_pages(advise=asked) == 0
    assert asked.places == set(range(12))


def test_it_ends_when_told_and_does_not_begin_where_it_is_forbidden(
    area: Area, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    area.fill(0, 12)
    asked = Asked(area)
    assert lay_in_huge_pages(is_over=lambda: len(asked.calls) == 1, advise=asked) < 12 * HUGE
    assert len(asked.calls) == 1
    rule(tmp_path, monkeypatch, "always madvise [never]\n")
    assert lay_in_huge_pages(advise=asked) == 0
    monkeypatch.setattr(huge_pages, "RULE", tmp_path / "nothing")
    assert lay_in_huge_pages(advise=asked) == 0
    assert len(asked.calls) == 1
