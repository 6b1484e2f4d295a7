"""`serve_app check` warns of models that set more memory aside than there is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.checkpoints import save_random_adapter
from serve_app.check.cluster_file import check_file
from serve_app.check.document import Severity
from serve_app.check.folders import Needs
from serve_app.check.memory import Reservation, check_memory, reservation
from serve_app.deployments.arguments import ModelArgs
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.loading import load_model
from tests.engine.conftest import DEMO
from tests.families import storing
from tests.families.making import save_model

pytestmark = pytest.mark.slow

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB left, told as Linux tells it."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    return tmp_path


def of(num_replicas: int, kv_cache_bytes: int) -> Reservation:
    needs = Needs(weight_bytes=GIB // 2, own_bytes=GIB // 4, adapter_bytes=GIB // 4)
    return Reservation(path=("args",), num_replicas=num_replicas, kv_cache_bytes=kv_cache_bytes, needs=needs)


def test_replicas_of_all_models_are_added_up(root: Path) -> None:
    assert list(check_memory([of(2, 3 * GIB)], root=root)) == []
    first, second = check_memory([of(2, 3 * GIB), of(1, GIB // 2)], root=root)
    told = "3.0 GiB of kv_cache_bytes, 0.5 GiB of weights, 0.2 GiB of adapters, 0.2 GiB for steps and libraries"
    assert f"2 × ({told}) is 8.0 GiB" in first.message
    assert first.message.endswith("all models together want 9.5 GiB, and this machine has 8.0 GiB left")
    assert second.path == ("args", "kv_cache_bytes")


def test_nothing_is_said_where_the_machine_does_not_say_what_it_has(tmp_path: Path) -> None:
    assert list(check_memory([of(1000, GIB)], root=tmp_path)) == []


@pytest.mark.parametrize(
    ("deployment", "num_replicas"),
    [
        ({}, 1),
        ({"num_replicas": 3}, 3),
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


QUANTISED: dict[str, tuple[dict[str, Any], Callable[[Tensor], storing.Stored]]] = {
    "fp8": ({"quant_method": "fp8"}, storing.fp8_whole),
    "gptq": ({"quant_method": "gptq", "bits": 4}, storing.gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, storing.awq),
    "bitsandbytes int8": ({"load_in_8bit": True}, storing.bnb_int8),
    "bitsandbytes nf4": ({"quant_method": "bitsandbytes"}, storing.bnb_nf4),
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "experts": ("qwen3_moe", {}),
    "with eyes": ("gemma3", {}),
}


def write_model(kind: str, folder: Path) -> Path:
    """A small checkpoint of that kind."""
    if kind in QUANTISED:
        save_model("llama", {}, folder / "plain")
        settings, pack = QUANTISED[kind]
        return storing.store(folder / "plain", folder / "stored", settings, pack, ending="proj.weight")
    if kind in FAMILIES:
        save_model(*FAMILIES[kind], folder)
        return folder
    save_model("llama", {}, folder)
    tensors = load_file(folder / "model.safetensors")
    halves = {name: each.bfloat16() for name, each in tensors.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "dtype": "bfloat16"}))
    return folder


def taken_bytes(module: nn.Module) -> int:
    """What a loaded module takes, counted by its storages."""
    storages = [each.untyped_storage() for each in (*module.parameters(), *module.buffers())]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, "auto") for kind in (*QUANTISED, *FAMILIES, "bfloat16")),
        ("plain", "bfloat16"),
        ("fp8", "bfloat16"),
        ("bfloat16", "float32"),
    ],
)
def test_weights_are_counted_as_loading_takes_them(kind: str, dtype: str, root: Path, tmp_path: Path) -> None:
    folder = write_model(kind, tmp_path / "model")
    args = ModelArgs.model_validate({"name": "a", "path": str(folder), "dtype": dtype, "kv_cache_bytes": 1 << 20})
    found = reservation({}, args, (), root=root)
    loaded = load_model(EngineConfig(name="a", path=str(folder), dtype=dtype, kv_cache_bytes=1 << 20))
    assert found is not None
    assert found.needs.weight_bytes == taken_bytes(loaded.module)


def test_what_a_start_would_refuse_for_want_of_room_for_steps_is_warned_of(root: Path) -> None:
    """8 GiB hold the demo's weights and 7.9 GiB of keys and values, and nothing beside."""
    fitting, tight = (
        ModelArgs(name="demo", path="builtin:demo", kv_cache_bytes=num_bytes) for num_bytes in (7 * GIB, 79 * GIB // 10)
    )
    assert list(check_memory([reservation_of(fitting, root)], root=root)) == []
    (warning,) = check_memory([reservation_of(tight, root)], root=root)
    assert "for steps and libraries" in warning.message


def test_as_many_adapters_as_may_be_resident_are_counted_the_largest(root: Path, tmp_path: Path) -> None:
    module = load_model(EngineConfig(name="demo", path=str(DEMO), kv_cache_bytes=1 << 20)).module
    for name, rank in (("small", 1), ("large", 8), ("larger", 16)):
        save_random_adapter(tmp_path / "adapters" / name, module, rank=rank, seed=0)
    sizes = [
        (tmp_path / "adapters" / name / "adapter_model.safetensors").stat().st_size for name in ("large", "larger")
    ]
    args = ModelArgs(
        name="demo", path="builtin:demo", adapters=str(tmp_path / "adapters"), max_adapters=2, kv_cache_bytes=GIB
    )
    assert reservation_of(args, root).needs.adapter_bytes == sum(sizes)


def reservation_of(args: ModelArgs, root: Path) -> Reservation:
    found = reservation({}, args, (), root=root)
    assert found is not None
    return found


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


def test_the_model_that_alone_wants_more_than_there_is_is_refused_and_no_other(root: Path) -> None:
    (found,) = check_memory([of(1, GIB), replace(of(2, 8 * GIB), name="large"), of(2, 3 * GIB)], root=root)
    assert found.severity is Severity.ERROR
    assert found.message.startswith("one replica of large takes 9.0 GiB (8.0 GiB of kv_cache_bytes, 0.5 GiB of weights")
    assert found.message.endswith("and this machine has 8.0 GiB left: lower it, or write `auto`")


@pytest.mark.parametrize(("location", "severity"), [("HeadOnly", "error"), ("EveryNode", "warning")])
def test_a_file_that_wants_more_than_this_machine_has_is_for_others_alone(
    tmp_path: Path, location: str, severity: str
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"proxy_location: {location}\napplications:\n- name: router\n  import_path: serve_app.deployments.apps:router\n"
        "  args: {}\n"
        "- name: demo\n  route_prefix: null\n  import_path: serve_app.deployments.apps:model\n"
        f"  args:\n    name: demo\n    path: builtin:demo\n    device: cpu\n    kv_cache_bytes: {1 << 60}\n"
    )
    report = check_file(str(file))
    assert report.is_sound == (severity == "warning")
    told = f":13: {severity}: applications[1].args.kv_cache_bytes: one replica of demo takes 1073741824"
    assert any(told in line for line in report.lines), report.lines
