"""What a process may still take: what the machine has left, or the tightest container around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.engine.kv.budget import free_host_bytes

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB left, told as Linux tells it."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/kubepods/pod\n")
    return tmp_path


def bound(folder: Path, limit: str) -> None:
    """Put us into a container of that size that holds 3 GiB, one of them pages of files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{3 * GIB}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")


@pytest.mark.parametrize(("limit", "left"), [("max", 8), (str(4 * GIB), 2), (str(64 * GIB), 8), (str(GIB), 0)])
def test_the_machine_or_the_container_says_what_is_left_whichever_has_less(root: Path, limit: str, left: int) -> None:
    bound(root / "sys/fs/cgroup/kubepods/pod", limit)
    assert free_host_bytes(root) == left * GIB


def test_the_tightest_limit_above_a_process_counts(root: Path) -> None:
    groups = root / "sys/fs/cgroup"
    bound(groups / "kubepods/pod", "max")
    bound(groups / "kubepods", str(8 * GIB))
    bound(groups / "elsewhere", str(4 * GIB))
    assert free_host_bytes(root) == 6 * GIB


def test_limits_of_the_first_version_count_too(root: Path) -> None:
    folder = root / "sys/fs/cgroup/memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{5 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (folder / "memory.stat").write_text(f"total_inactive_file {GIB}\n")
    assert free_host_bytes(root) == 3 * GIB


def test_nothing_is_known_where_nothing_says_it(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) is None
