"""How much memory this process may still take on its machine: what nobody uses, within every limit it is under."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def free_host_bytes(root: Path = ROOT) -> int | None:
    """The least that the machine and every cgroup above the process leave; None where nothing says, as off Linux.

    root: where proc and sys are
    """
    return min([*_free_of_the_machine(root), *_free_of_cgroups(root)], default=None)


def _free_of_the_machine(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _free_of_cgroups(root: Path) -> Iterator[int]:
    """What each limit above this process leaves; the page cache counts as free. Version 2, then version 1."""
    groups = root / "sys/fs/cgroup"
    own = groups / _own_cgroup(root)
    for folder in (own, *own.parents):
        if folder.is_relative_to(groups):
            yield from _free_of(folder, "memory.max", "memory.current", "inactive_file")
    yield from _free_of(groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _own_cgroup(root: Path) -> str:
    lines = _text(root / "proc/self/cgroup").splitlines()
    return next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")


def _free_of(folder: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    maximum, used = _text(folder / limit).strip(), _text(folder / usage).strip()
    if maximum.isdecimal() and used.isdecimal():
        lines = _text(folder / "memory.stat").splitlines()
        cached = next((int(line.split()[1]) for line in lines if line.startswith(f"{cache} ")), 0)
        yield max(0, int(maximum) - int(used) + cached)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
