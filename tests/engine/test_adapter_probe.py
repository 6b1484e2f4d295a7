"""Law: an adapter that breaks the model's numbers or changes none of them is refused before anybody is served."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from serve_app.catalog.adapters import read_adapter
from serve_app.core.cards import AdapterRecord
from serve_app.engine.lora.adapter import check_values
from serve_app.engine.lora.matching import AdapterRefused
from serve_app.engine.lora.modules import BankedLinear
from serve_app.engine.lora.registration import bind_adapters
from tests.engine.adapter_files import load_adapter, save_adapter
from tests.engine.conftest import DEMO, DEMO_ADAPTERS, SHARED_MODELS


def load(path: Path, dtype: str = "float32") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=dtype).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load(DEMO)


def record(folder: Path) -> AdapterRecord:
    return replace(read_adapter(folder, root=folder.parent), version=f"version of {folder.name}")


def reasons(model: PreTrainedModel, *folders: Path) -> dict[str, str | None]:
    bound, cards = bind_adapters([record(folder) for folder in folders], model)
    assert [adapter.version for adapter in bound] == [each.version for each in cards if each.is_usable]
    return {each.name: each.reason for each in cards}


def test_good_ones_pass_beside_each_kind_that_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    folders = [
        save_adapter(tmp_path / "good", model, seed=1),
        save_adapter(tmp_path / "huge", model, down=1e38, up=1.0),
        save_adapter(tmp_path / "large", model, down=1e19, up=1e19, targets=("q_proj",)),
        save_adapter(tmp_path / "zero_up", model, up=0.0),
        save_adapter(tmp_path / "zero_down", model, down=0.0),
        save_adapter(tmp_path / "no_alpha", model, alpha=0),
        save_adapter(tmp_path / "fresh_dora", model, up=0.0, use_dora=True, magnitude_noise=0.0),
        save_adapter(tmp_path / "trained_dora", model, up=0.0, use_dora=True),
        save_adapter(tmp_path / "not_a_number", model, down=float("nan")),
        save_adapter(tmp_path / "wide", model, rank=256, seed=2),
    ]
    found = reasons(model, *folders)
    assert {name for name, reason in found.items() if reason is None} == {"good", "trained_dora", "wide"}
    for name in ("zero_up", "zero_down", "no_alpha", "fresh_dora"):
        assert str(found[name]).startswith("inert: "), (name, found[name])
    assert "too large" in str(found["huge"])
    assert "too large" in str(found["large"])
    assert "not finite in float32" in str(found["not_a_number"])


@pytest.mark.parametrize(
    ("dtype", "down", "up", "reason"),
    [
        ("float32", 0.2, 0.2, None),
        ("float32", 1e19, 1e-19, None),
        ("float32", 1e19, 1e19, "its values are too large: with it, the model's outputs are not finite in float32"),
        ("float32", torch.nan, 1.0, "lora_A.weight holds values that are not finite in float32"),
        ("float16", 10.0, 20.0, None),
        ("float16", 1000.0, 20.0, "its values are too large: with it, the model's outputs are not finite in float16"),
        ("float16", 1e-30, 1e6, "lora_B.weight, scaled by 1, holds values that are not finite in float16"),
        ("bfloat16", 1000.0, 200.0, None),
    ],
)
def test_values_alone_say_what_a_probe_says(
    model: PreTrainedModel, tmp_path: Path, dtype: str, down: float, up: float, reason: str | None
) -> None:
    folder = save_adapter(tmp_path / "a", model, down=down, up=up, targets=("q_proj",))
    tensors = load_file(folder / "adapter_model.safetensors")
    if reason is None:
        check_values(tensors, lambda name: 1.0, dtype=getattr(torch, dtype))
        assert reasons(load(DEMO, dtype), folder) == {"a": None}
        return
    with pytest.raises(AdapterRefused, match=reason):
        check_values(tensors, lambda name: 1.0, dtype=getattr(torch, dtype))
    assert re.search(reason, str(reasons(load(DEMO, dtype), folder)["a"]))


def test_what_is_finite_is_judged_in_the_models_dtype(tmp_path: Path) -> None:
    half = load(DEMO, "float16")
    folder = save_adapter(tmp_path / "a", half, down=1e-30, up=1e6)
    assert "lora_B" in str(reasons(half, folder)["a"])
    assert "not finite in float16" in str(reasons(half, folder)["a"])


def test_the_model_is_left_as_it_was(model: PreTrainedModel, tmp_path: Path) -> None:
    ids = torch.arange(10)[None]
    before = model(input_ids=ids).logits
    modules = dict(model.named_modules())
    reasons(model, save_adapter(tmp_path / "good", model), save_adapter(tmp_path / "huge", model, down=1e38, up=1.0))
    assert dict(model.named_modules()) == modules
    assert not any(isinstance(module, BankedLinear) for module in model.modules())
    assert torch.equal(model(input_ids=ids).logits, before)


def test_adapters_that_come_with_the_service_pass(model: PreTrainedModel) -> None:
    folders = sorted(folder.parent for folder in DEMO_ADAPTERS.glob("*/adapter_config.json"))
    assert folders
    assert set(reasons(model, *folders).values()) == {None}


def test_adapters_trained_elsewhere_pass() -> None:
    folders = sorted(SHARED_MODELS.glob("stories260K-lora-*"))
    if not folders:
        pytest.skip("the trained adapters are not here")
    assert set(reasons(load(SHARED_MODELS / "stories260K"), *folders).values()) == {None}


def test_a_known_adapter_is_facts_and_not_weights(model: PreTrainedModel, tmp_path: Path) -> None:
    narrow, wide = (
        load_adapter(save_adapter(tmp_path / f"{rank}", model, rank=rank), version="a", model=model)
        for rank in (2, 256)
    )
    assert wide.file.path.stat().st_size > 50 * narrow.file.path.stat().st_size
    assert len(pickle.dumps(wide)) < 1.1 * len(pickle.dumps(narrow))
