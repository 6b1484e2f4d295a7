"""`serve_app check` warns of models that set more memory aside than there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.check.cluster_file import check_file
from serve_app.check.memory import Reservation, available_bytes, check_memory, reservation
from serve_app.deployments.arguments import ModelArgs

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB left, told as Linux tells it."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    return tmp_path


def contain(root: Path, limit: str) -> None:
    """Put us into a container of that size that holds 3 GiB, one of them pages of files."""
    (root / "proc/self/cgroup").write_text("0::/box\n")
    folder = root / "sys/fs/cgroup/box"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{3 * GIB}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")


def of(num_replicas: int, kv_cache_bytes: int) -> Reservation:
    return Reservation(path=("args",), num_replicas=num_replicas, kv_cache_bytes=kv_cache_bytes, weight_bytes=GIB)


@pytest.mark.parametrize(("limit", "left"), [("max", 8), (str(4 * GIB), 2), (str(64 * GIB), 8)])
def test_the_machine_or_the_container_says_what_is_left_whichever_has_less(root: Path, limit: str, left: int) -> None:
    contain(root, limit)
    assert available_bytes(root) == left * GIB


def test_replicas_of_all_models_are_added_up(root: Path) -> None:
    assert list(check_memory([of(2, 3 * GIB)], root=root)) == []
    first, second = check_memory([of(2, 3 * GIB), of(1, GIB // 2)], root=root)
    assert "2 × (3.0 GiB of kv_cache_bytes + 1.0 GiB of weights) is 8.0 GiB" in first.message
    assert first.message.endswith("all models together want 9.5 GiB, and this machine has 8.0 GiB left")
    assert second.path == ("args", "kv_cache_bytes")


def test_nothing_is_said_where_the_machine_does_not_say_what_it_has(tmp_path: Path) -> None:
    assert list(check_memory([of(1000, GIB)], root=tmp_path)) == []


@pytest.mark.parametrize(
    ("deployment", "num_replicas"),
    [
        ({}, 1),
        ({"num_replicas": 3}, 3),
        ({"num_replicas": "auto", "autoscaling_config": {"max_replicas": 4}}, 4),
        ({"num_replicas": "auto"}, 1),
    ],
)
def test_the_most_replicas_that_the_file_asks_for_count(
    root: Path, deployment: dict[str, object], num_replicas: int
) -> None:
    args = ModelArgs(name="demo", path="builtin:demo", kv_cache_bytes=GIB)
    found = reservation({"deployments": [{"name": "Model", **deployment}]}, args, ("args",), root=root)
    assert found is not None
    assert found.num_replicas == num_replicas
    assert found.num_bytes > num_replicas * GIB


def test_what_a_gpu_holds_is_not_the_hosts(root: Path) -> None:
    args = ModelArgs(name="demo", path="builtin:demo", kv_cache_bytes=GIB)
    assert reservation({}, args, (), root=root) is not None
    assert reservation({}, args.model_copy(update={"device": "cuda"}), (), root=root) is None
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()
    assert reservation({}, args, (), root=root) is None
    assert reservation({}, args.model_copy(update={"device": "cpu"}), (), root=root) is not None


def test_an_amount_that_the_engine_finds_by_itself_fits(root: Path) -> None:
    args = ModelArgs(name="demo", path="builtin:demo").model_copy(update={"kv_cache_bytes": "auto"})
    assert reservation({}, args, (), root=root) is None


def test_a_file_that_wants_more_than_any_machine_has_is_served_with_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "applications:\n- name: demo\n  route_prefix: null\n  import_path: serve_app.deployments.apps:model\n"
        f"  args:\n    name: demo\n    path: builtin:demo\n    device: cpu\n    kv_cache_bytes: {1 << 60}\n"
    )
    report = check_file(str(file))
    assert report.is_sound
    assert any(
        ":9: warning: applications[0].args.kv_cache_bytes: 1 × (1073741824.0 GiB" in line for line in report.lines
    )
