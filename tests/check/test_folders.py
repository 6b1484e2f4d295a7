"""`serve_app check` says of a model and of its adapters what loading them says: both ask the same judges."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from serve_app.backends.vllm.options import engine_arguments
from serve_app.catalog.adapters import read_records
from serve_app.catalog.files import CatalogError
from serve_app.check.document import Severity
from serve_app.check.folders import check_model, check_model_folder
from serve_app.check.keys import refused_values, unknown_keys
from serve_app.deployments.arguments import ModelArgs
from serve_app.deployments.loading import load_service
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.loading import load_model
from serve_app.engine.decoder.text_part import ModelNotSupported
from serve_app.engine.lora.registration import bind_adapters
from tests.catalog.zoo import SOUND_CONFIG, write_adapter
from tests.families.making import save_config, save_model


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"quantization_config": {"quant_method": "aqlm"}}),
        ("qwen3_next", {}),
        ("bart", {}),
        ("bloom", {}),
    ],
)
def test_a_model_is_refused_by_the_check_with_the_reason_of_loading(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    save_config(family, settings, tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    [finding] = check_model(ModelArgs(name="a", path=str(tmp_path)), ("applications", 0))
    with pytest.raises(ModelNotSupported) as refused:
        load_model(EngineConfig(name="a", path=str(tmp_path)))
    assert (finding.severity, finding.message) == (Severity.ERROR, str(refused.value))


def test_a_chat_template_that_cannot_be_read_is_found_by_both_checks_as_by_loading(tmp_path: Path) -> None:
    shutil.copytree("serve_app/demo/model", tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.json").write_text("{")
    args = ModelArgs(name="a", path=str(tmp_path))
    with pytest.raises(CatalogError, match=r"chat_template.json is not JSON") as refused:
        load_service(args, "replica-0")
    [finding] = check_model(args, ("applications", 0))
    assert finding.message == check_model_folder(str(tmp_path), dtype="auto").reason == str(refused.value)
    replaced = args.model_copy(update={"chat_template": "{{ messages }}"})
    assert list(check_model(replaced, ("applications", 0))) == []


def test_a_shape_that_no_kernel_takes_is_found_by_the_check_as_by_loading(tmp_path: Path) -> None:
    save_model("llama", {"intermediate_size": 48}, tmp_path)
    [finding] = check_model(ModelArgs(name="a", path=str(tmp_path), weights="int4"), ("applications", 0))
    with pytest.raises(ModelNotSupported, match=r"down_proj \[32, 48\]") as refused:
        load_model(EngineConfig(name="a", path=str(tmp_path), weights="int4"))
    assert finding.message == str(refused.value)


@pytest.mark.parametrize(
    ("settings", "changes", "reason"),
    [
        ({}, {"tensor_parallel": 3}, "does not divide the model's 4 heads of queries"),
        ({"intermediate_size": 50}, {"tensor_parallel": 4}, "does not divide the model's 50 columns of the MLP"),
        (
            {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
            {"tensor_parallel": 2},
            "3 heads of keys",
        ),
        ({}, {"tensor_parallel": 2, "weights": "int8"}, "weights in few bits are not divided"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_the_check_as_by_loading(
    settings: dict[str, Any], changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save_model("llama", settings, tmp_path)
    [finding] = check_model(ModelArgs(name="a", path=str(tmp_path), **changes), ("applications", 0))
    with pytest.raises(ModelNotSupported, match=reason) as refused:
        load_model(EngineConfig(name="a", path=str(tmp_path), **changes))
    assert finding.message == str(refused.value)


@pytest.mark.skipif(find_spec("timm") is not None, reason="what it is to lack is installed")
def test_a_package_that_a_model_lacks_is_found_by_the_check_as_by_loading(tmp_path: Path) -> None:
    save_config("gemma3n", {}, tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    [finding] = check_model(ModelArgs(name="a", path=str(tmp_path)), ("applications", 0))
    with pytest.raises(ModelNotSupported, match="pip install timm pillow") as refused:
        load_model(EngineConfig(name="a", path=str(tmp_path)))
    assert finding.message == str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"), [("weights", "int8"), ("tensor_parallel", 2), ("return_hidden_states", True)]
)
def test_a_setting_that_vllm_would_leave_out_is_refused_by_the_check_as_by_loading(name: str, value: object) -> None:
    args = ModelArgs.model_validate({"name": "a", "path": "builtin:demo", "engine": "vllm", name: value})
    [finding] = check_model(args, ("args",))
    with pytest.raises(ModelNotSupported, match=f"{name} must be left out, as only `engine: own`") as refused:
        engine_arguments(args, ())
    assert (finding.path, f"{name} {finding.message}") == (("args", name), str(refused.value))


def test_a_setting_that_vllm_carries_out_passes_the_check() -> None:
    carried = {"max_num_sequences": 8, "dtype": "float32", "prefix_cache": False, "turn_quantum": 8, "device": "cpu"}
    args = ModelArgs.model_validate({"name": "a", "path": "builtin:demo", "engine": "vllm", **carried})
    assert [*check_model(args, ("args",))] == []


def test_what_the_check_lets_pass_is_loaded(tmp_path: Path) -> None:
    save_model("llama", {}, tmp_path)
    assert list(check_model(ModelArgs(name="a", path=str(tmp_path)), ("applications", 0))) == []
    assert load_model(EngineConfig(name="a", path=str(tmp_path), kv_cache_bytes=1 << 20)).max_model_len == 256


def test_an_adapter_is_refused_by_the_check_with_the_reason_of_loading(tmp_path: Path) -> None:
    save_model("llama", {}, tmp_path / "model")
    for name, fields in (("bias", {"lora_bias": True}), ("kind", {"peft_type": "IA3"}), ("rank", {"r": 8})):
        write_adapter(tmp_path / "adapters" / name, config={**SOUND_CONFIG, **fields})
    args = ModelArgs(name="a", path=str(tmp_path / "model"), adapters=str(tmp_path / "adapters"))
    checked = [finding.message for finding in check_model(args, ("applications", 0))]
    module = load_model(EngineConfig(name="a", path=args.path, kv_cache_bytes=1 << 20)).module
    _, cards = bind_adapters(read_records(tmp_path / "adapters"), module)
    assert checked == [f"adapter {card.name}: refused, {card.reason}" for card in cards]
    assert len(cards) == 3


@pytest.mark.parametrize("place", ["nowhere", "adapters/a"])
def test_what_is_no_folder_of_adapters_is_an_error_of_the_check_and_of_the_start(place: str, tmp_path: Path) -> None:
    save_model("llama", {}, tmp_path / "model")
    write_adapter(tmp_path / "adapters" / "a")
    args = ModelArgs(name="a", path=str(tmp_path / "model"), adapters=str(tmp_path / place))
    [finding] = check_model(args, ("applications", 0))
    with pytest.raises(CatalogError, match="`adapters` names") as refused:
        load_service(args, "r1")
    assert (finding.message, finding.severity) == (str(refused.value), Severity.ERROR)


def test_a_watched_folder_is_explained_and_mistakes_in_it_are_named(tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    written = {"name": "a", "path": "builtin:demo"}
    watched = ModelArgs.model_validate({**written, "adapters": {"path": str(tmp_path / "adapters"), "watch": True}})
    assert (watched.adapters_folder, watched.watches_adapters) == (tmp_path / "adapters", True)
    told = [str(finding.message) for finding in check_model(watched, ("args",))]
    assert any(message.startswith("is watched: while the service runs") for message in told)
    found = {}
    mistakes: tuple[object, ...] = ({"path": "x", "wach": True}, {"watch": True}, {"path": "x", "watch": "perhaps"}, 5)
    for adapters in mistakes:
        data = {**written, "adapters": adapters}
        for each in (*unknown_keys(data, ModelArgs, ("args",)), *refused_values(data, ModelArgs, ("args",))):
            found[".".join(map(str, each.path))] = each.message
    assert found.keys() == {"args.adapters.wach", "args.adapters", "args.adapters.watch"}
    assert "did you mean 'watch'?" in found["args.adapters.wach"]
