"""A configuration is read by the library's own class, without what would reach out of it; what is not read is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from serve_app.engine.decoder.config_check import check_config
from serve_app.engine.decoder.loading import load_model, read_eos_token_ids
from serve_app.engine.decoder.text_part import ModelNotSupported
from serve_app.text.tokenizer import TextTokenizer
from tests.engine.harness import config
from tests.families.making import NUM_BYTES, SPECIAL_TOKENS, make_config, save_config, save_model

LLAMA = make_config("llama").to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
CODE = "configuration_own.OwnConfig"
OWN_CODE = {"AutoConfig": CODE, "AutoModelForCausalLM": "modeling_own.OwnForCausalLM", "AutoTokenizer": [CODE, CODE]}
REACHING_OUT: tuple[dict[str, Any], ...] = (
    {"auto_map": OWN_CODE},
    {"auto_map": dict.fromkeys(OWN_CODE, f"elsewhere/own--{CODE}")},
    {"custom_pipelines": {"text-generation": {"impl": CODE, "pt": ["OwnForCausalLM"]}}},
    {"attn_implementation": "elsewhere/kernel"},
    {"_attn_implementation": "elsewhere/kernel"},
    {"_attn_implementation_internal": "elsewhere/kernel"},
    {"_attn_implementation": {"": "elsewhere/kernel"}},
    {"experts_implementation": "elsewhere/kernel"},
    {"_experts_implementation": "elsewhere/kernel"},
    {"_experts_implementation_internal": "elsewhere/kernel"},
    {"_auto_class": "AutoModelForCausalLM"},
    {"_commit_hash": "main"},
    {"fusion_config": {"patch_embeddings": True}},
    {"distributed_config": {"tp_size": 2}},
    {"base_model_tp_plan": {"layers.*": CODE}},
    {"sub_configs": {"text_config": CODE}},
    {"attribute_map": {"hidden_size": "vocab_size"}},
    {"to_dict": "no method"},
    {"extra_files": ["head.safetensors"]},
    {"use_return_dict": True},
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save_model("llama", {}, folder)
    return folder


@pytest.fixture
def folder_with(plain: Path, tmp_path: Path) -> Callable[[Mapping[str, Any]], Path]:
    """Gives the plain folder with other settings, beside code that leaves a file where anybody runs it."""

    def make(settings: Mapping[str, Any]) -> Path:
        for file in plain.iterdir():
            if file.name != "config.json" and not (tmp_path / file.name).exists():
                (tmp_path / file.name).symlink_to(file)
        for name in ("configuration_own", "modeling_own"):
            (tmp_path / f"{name}.py").write_text("from pathlib import Path\nPath(__file__).with_name('RAN').touch()\n")
        own = json.loads((plain / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**own, **settings}))
        return tmp_path

    return make


HEARD: list[str] = []
"""What the interpreter was about to do, of what reaches out. Its hook cannot be taken away again."""


@pytest.fixture(scope="module")
def heard() -> list[str]:
    def hook(event: str, facts: tuple[Any, ...]) -> None:
        if event.startswith("socket.") and event not in ("socket.__new__", "socket.bind"):
            HEARD.append(f"{event} {facts}")
        if event == "open" and str(facts[0]).endswith(("_own.py", "kernel")) and facts[1] in (None, "r", "rb"):
            HEARD.append(f"{event} {facts}")

    if not HEARD:
        sys.addaudithook(hook)
    return HEARD


@pytest.mark.parametrize("settings", REACHING_OUT, ids=lambda each: next(iter(each)))
def test_nothing_that_a_configuration_names_is_imported_or_fetched(
    settings: dict[str, Any], folder_with: Callable[..., Path], plain: Path, heard: list[str]
) -> None:
    own, [name] = check_config(plain).config, settings
    heard.clear()
    for placed in (settings, {"more": [settings]}, {"vision": {"more": settings}}):
        folder = folder_with(placed)
        checked = check_config(folder)
        assert any(name in note for note in checked.notes)
        if placed is settings:
            assert {**checked.config.to_dict(), "_name_or_path": ""} == {**own.to_dict(), "_name_or_path": ""}
            assert (checked.config._attn_implementation, checked.config._experts_implementation) == (None, None)
    assert heard == []
    assert not (folder / "RAN").exists()


@pytest.mark.slow
def test_what_was_left_out_is_not_run_by_loading_either(folder_with: Callable[..., Path], heard: list[str]) -> None:
    heard.clear()
    folder = folder_with({name: value for each in REACHING_OUT for name, value in each.items()})
    assert load_model(config(folder)).module.config._experts_implementation != "elsewhere/kernel"
    assert heard == []
    assert not (folder / "RAN").exists()


def test_what_no_class_reads_is_told_and_what_one_reads_is_not(folder_with: Callable[..., Path]) -> None:
    checked = check_config(
        folder_with({"auto_gptq": 1, "hidden_act": "gelu", "rope_scaling": None, "pretraining_tp": 1})
    )
    assert checked.notes == ("config.json: LlamaConfig does not read, so it changes nothing: auto_gptq",)
    assert checked.config.hidden_act == "gelu"


@pytest.mark.parametrize("settings", [{"model_type": "of_nobody"}, {"model_type": None}, {"model_type": "deepseek"}])
@pytest.mark.parametrize("code", [None, "modeling_own.LlamaForCausalLM"])
def test_a_type_that_is_not_known_is_read_by_its_architecture(
    settings: dict[str, Any], code: str | None, folder_with: Callable[..., Path]
) -> None:
    named = {"auto_map": {"AutoModelForCausalLM": code}} if code else {}
    checked = check_config(folder_with({**settings, **named, "architectures": ["LlamaForCausalLM"]}))
    assert checked.config.model_type == "llama"
    assert any("is read as llama, by its architectures" in note for note in checked.notes)


@pytest.mark.parametrize(
    "settings",
    [
        {"architectures": ["OwnForCausalLM"]},
        {"architectures": ["LlamaForCausalLM"], "auto_map": OWN_CODE},  # which says that its class is another
        {"architectures": None},
        {"architectures": ["LlamaModel", "pipeline", "AutoModelForCausalLM"]},
        {"architectures": ["PhiForCausalLM"], "hidden_size": None, "n_embd": 32},  # sizes in words of another class
    ],
)
def test_an_architecture_that_the_library_has_not_is_refused_with_the_way_out(
    settings: dict[str, Any], folder_with: Callable[..., Path]
) -> None:
    folder = folder_with({"model_type": "of_nobody", **settings})
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({name: value for name, value in own.items() if value is not None}))
    with pytest.raises(
        ModelNotSupported, match=r"has no class for model_type 'of_nobody'.*serve the model in a format"
    ):
        check_config(folder)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"hidden_size": "many"}, "hidden_size"),
        ({"num_attention_heads": 0}, "by zero"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_a_value_that_the_class_does_not_take_is_refused(
    settings: dict[str, Any], told: str, folder_with: Callable[..., Path]
) -> None:
    with pytest.raises(ModelNotSupported, match=f"^config.json: .*{told}"):
        check_config(folder_with(settings))


def test_a_class_that_no_table_of_the_library_has_is_found_by_its_name(tmp_path: Path) -> None:
    save_config("mllama_text_model", {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]}, tmp_path)
    with pytest.raises(ModelNotSupported, match="no class that completes text"):
        check_config(tmp_path)
    own = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**own, "architectures": ["MllamaForCausalLM"]}))
    assert check_config(tmp_path).kind.__name__ == "MllamaForCausalLM"


OWN_END, CONFIGURED, GENERATED = NUM_BYTES + 1, 17, 18
"""The end that the tokenizer names, and others."""


@pytest.mark.parametrize(
    ("configured", "generated", "ends"),
    [
        (CONFIGURED, GENERATED, {CONFIGURED, GENERATED, OWN_END}),
        ([CONFIGURED, 19], [GENERATED, 20], {CONFIGURED, 19, GENERATED, 20, OWN_END}),
        (None, None, {OWN_END}),
        (None, GENERATED, {GENERATED, OWN_END}),
        (CONFIGURED, None, {CONFIGURED, OWN_END}),
        ([CONFIGURED, 100_000, -1], 100_001, {CONFIGURED, OWN_END}),
        (OWN_END, "broken", {OWN_END}),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_text_ends_where_any_of_its_files_says(
    configured: Any, generated: Any, ends: set[int], family: str, tmp_path: Path
) -> None:
    save_config(family, {}, tmp_path)
    own = json.loads((tmp_path / "config.json").read_text())
    part = own["text_config"] if family == "gemma3" else own
    part["eos_token_id"] = configured
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generated}))
    tokenizer = TextTokenizer.load(tmp_path, vocab_size=NUM_BYTES + len(SPECIAL_TOKENS))
    assert read_eos_token_ids(check_config(tmp_path), tmp_path) | tokenizer.eos_token_ids == ends
