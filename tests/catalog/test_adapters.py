"""Adapters on disk: the sound ones are read, each broken one is listed with its reason."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from serve_app.catalog.adapters import read_adapters, read_records
from serve_app.core.adapters import AdapterRecord
from tests.catalog.zoo import MODULE, SOUND_CONFIG, array, entry, pair, raw_file, write_adapter

ROOT = Path(__file__).resolve().parents[2]
A, B, MAGNITUDE = f"{MODULE}.lora_A.weight", f"{MODULE}.lora_B.weight", f"{MODULE}.lora_magnitude_vector"


def read_one(folder: Path) -> AdapterRecord:
    [record] = read_records(folder.parent)
    return record


def config(**fields: Any) -> dict[str, Any]:
    return {**SOUND_CONFIG, **fields}


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in SOUND_CONFIG.items() if name != field}


BROKEN_CONFIGS: dict[str, tuple[Any, str]] = {
    "no config": (None, "adapter_config.json is missing"),
    "config is no JSON": ("{", "adapter_config.json is not valid JSON"),
    "config is no UTF-8 text of an object": ("[]", "must hold a JSON object, found list"),
    "config repeats a key": ('{"r": 1, "r": 2}', "the key 'r' is given twice"),
    "config has NaN": ('{"r": NaN}', "NaN is not a number of JSON"),
    "config is deep": ("[" * 100_000, "nested too deeply"),
    "config is large": (" " * (2**20 + 1), "larger than 1048576 bytes"),
    "no peft_type": (without("peft_type"), "peft_type must be"),
    "another method": (config(peft_type="IA3"), "found 'IA3'"),
    "no rank": (without("r"), "r must be a whole number from 1 to 256, found 'None'"),
    "rank zero": (config(r=0), "r must be"),
    "rank true": (config(r=True), "r must be"),
    "rank too large": (config(r=257), "from 1 to 256, found '257'"),
    "no alpha": (without("lora_alpha"), "lora_alpha must be"),
    "alpha infinite": (json.dumps(config(lora_alpha="X")).replace('"X"', "1e999"), "lora_alpha must be"),
    "rank by pattern too large": (config(rank_pattern={"q_proj": 999}), "rank_pattern['q_proj'] must be"),
    "pattern is a list": (config(rank_pattern=["q_proj"]), "rank_pattern must be an object"),
    "pattern is no expression": (config(rank_pattern={"q_proj(": 4}), "no expression"),
    "pattern takes for ever": (config(alpha_pattern={"(a+)+b": 4}), "none of them behind a group"),
    "bias": (config(bias="all"), "bias must be"),
    "lora_bias": (config(lora_bias=True), "lora_bias is set"),
    "modules_to_save": (config(modules_to_save=["lm_head"]), "modules_to_save is set"),
    "layer_replication": (config(layer_replication=[[0, 2]]), "layer_replication is set"),
    "trainable tokens": (config(trainable_token_indices=[1]), "trainable_token_indices is set"),
    "target_parameters": (config(target_parameters=["experts"]), "target_parameters is set"),
    "activated LoRA": (config(alora_invocation_tokens=[1, 2]), "alora_invocation_tokens is set"),
    "QALoRA": (config(use_qalora=True), "use_qalora is set"),
    "a field of the future": (config(use_magic={"strength": 1}), "use_magic is set"),
    "PiSSA": (config(init_lora_weights="pissa_niter_4"), "changes the base model"),
    "odd initialisation": (config(init_lora_weights=["pissa"]), "changes the base model"),
    "use_dora is a word": (config(use_dora="yes"), "use_dora must be true or false"),
}

BROKEN_WEIGHTS: dict[str, tuple[Any, str]] = {
    "empty file": (b"", "it has 0 bytes"),
    "header longer than the file": ((2**40).to_bytes(8, "little") + b"{}", "header of 1099511627776 bytes"),
    "header over the limit": ((10**8 + 1).to_bytes(8, "little") + b"{}", "the limit of 100000000"),
    "header is no JSON": (raw_file("{"), "is not valid JSON"),
    "header repeats a tensor": (raw_file('{"a": 1, "a": 2}'), "given twice"),
    "no tensors": (raw_file({}), "has no tensors"),
    "offsets behind the end": (raw_file({A: entry([4, 6], 0, 96)}, b"\0" * 95), "the file is damaged"),
    "data behind the tensors": (raw_file({A: entry([4, 6], 0, 96)}, b"\0" * 97), "the file is damaged"),
    "tensors overlap": (raw_file({A: entry([1], 0, 4), B: entry([1], 2, 6)}, b"\0" * 6), "overlaps another"),
    "a gap between tensors": (raw_file({A: entry([1], 0, 4), B: entry([1], 5, 9)}, b"\0" * 9), "leaves a gap"),
    "negative shape": (raw_file({A: entry([-1, -4], 0, 16)}, b"\0" * 16), "must have a shape"),
    "shape of true": (raw_file({A: entry([True], 0, 4)}, b"\0" * 4), "must have a shape"),
    "huge shape": (raw_file({A: entry([2**62, 2**62], 0, 4)}, b"\0" * 4), "which its shape and dtype do not make"),
    "offsets backwards": (raw_file({A: entry([1], 4, 0)}, b"\0" * 4), "must have data_offsets"),
    "unknown dtype": (raw_file({A: entry([1], 0, 4, dtype="F31")}, b"\0" * 4), "the unknown dtype 'F31'"),
    "integers": (save(pair(dtype="int32")), "is int32; allowed are bfloat16, float16, float32"),
    "double precision": (save(pair(dtype="float64")), "is float64"),
    "lora_A without lora_B": (save({A: array(4, 6)}), f"tensor '{B}' is missing"),
    "lora_B without lora_A": (save({B: array(5, 4)}), f"tensor '{A}' is missing"),
    "ranks differ": (save({A: array(4, 6), B: array(5, 3)}), "lora_A has rank 4 and lora_B rank 3"),
    "rank is not the configured": (save(pair(rank=8)), "rank 8 and lora_B rank 8; adapter_config.json says 4"),
    "convolution": (save({A: array(4, 6, 1, 1), B: array(5, 4, 1, 1)}), "only linear layers"),
    "no inputs": (save({A: array(4, 0), B: array(5, 4)}), "only linear layers"),
    "embedding": (
        save({**pair(), "base_model.model.model.embed_tokens.lora_embedding_A": array(4, 9)}),
        "tensor 'base_model.model.model.embed_tokens.lora_embedding_A' is not supported",
    ),
    "a full copy": (save({**pair(), "base_model.model.lm_head.weight": array(9, 6)}), "lm_head.weight' is not"),
    "a bias": (save({**pair(), f"{MODULE}.lora_B.bias": array(5)}), "lora_B.bias' is not supported"),
    "another prefix": (save(pair("transformer.h.0.attn")), "'transformer.h.0.attn.lora_A.weight' is not supported"),
    "no module": (save({"base_model.model.lora_A.weight": array(4, 6)}), "is not supported"),
    "magnitude without DoRA": (save({**pair(), MAGNITUDE: array(5)}), "use_dora is not set"),
}


@pytest.mark.parametrize("case", BROKEN_CONFIGS)
def test_an_adapter_with_a_broken_config_is_listed_with_the_reason(case: str, tmp_path: Path) -> None:
    content, reason = BROKEN_CONFIGS[case]
    record = read_one(write_adapter(tmp_path / "broken", config=content))
    assert not record.is_usable
    assert reason in str(record.reason)


@pytest.mark.parametrize("case", BROKEN_WEIGHTS)
def test_an_adapter_with_broken_weights_is_listed_with_the_reason(case: str, tmp_path: Path) -> None:
    content, reason = BROKEN_WEIGHTS[case]
    record = read_one(write_adapter(tmp_path / "broken", weights=content))
    assert not record.is_usable
    assert reason in str(record.reason)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (pair(), "lora_magnitude_vector' is missing, which use_dora asks for"),
        ({**pair(), MAGNITUDE: array(6)}, "has the shape [6]; lora_B has 5 outputs"),
        ({**pair(), MAGNITUDE: array(5), f"{MAGNITUDE}.weight": array(5)}, "is there twice"),
    ],
)
def test_a_dora_adapter_needs_one_magnitude_per_output(tensors: Any, reason: str, tmp_path: Path) -> None:
    record = read_one(write_adapter(tmp_path / "broken", config=config(use_dora=True), weights=tensors))
    assert reason in str(record.reason)


@pytest.mark.parametrize("name", ["a+b", "a*0.5", "*"])
def test_a_name_that_would_be_a_mix_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    reason = str(read_one(write_adapter(tmp_path / name)).reason)
    assert f"the name {name!r} is not allowed, as * and + mix adapters in an address" in reason


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_pickled_weights_are_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    """Adapters in `.bin` are pickles, which run code where they are read."""
    folder = write_adapter(tmp_path / "pickled")
    (folder / "adapter_model.safetensors").rename(folder / name)
    assert "convert it to adapter_model.safetensors" in str(read_one(folder).reason)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "empty")
    (folder / "adapter_model.safetensors").unlink()
    assert read_one(folder).reason == "adapter_model.safetensors is missing"


@pytest.mark.parametrize("name", ["with space", "a" * 97, "col:on", "é", "semi;colon", "per%2ecent"])
def test_names_outside_the_alphabet_are_refused(name: str, tmp_path: Path) -> None:
    assert "is not allowed" in str(read_one(write_adapter(tmp_path / name)).reason)


def test_a_name_that_is_no_text_is_listed_as_text(tmp_path: Path) -> None:
    try:
        os.mkdir(os.fsencode(tmp_path) + b"/\xff")
    except OSError:
        pytest.skip("this file system has only names that are text")
    [card] = read_adapters(tmp_path)
    assert card.name == r"\xff"
    assert not card.is_usable


def test_links_that_lead_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "outside")
    base = tmp_path / "base"
    (base / "linked-files").mkdir(parents=True)
    for file in outside.iterdir():
        (base / "linked-files" / file.name).symlink_to(file)
    (base / "linked-folder").symlink_to(outside)
    (base / "loop").symlink_to(base / "loop")
    reasons = {card.name: str(card.reason) for card in read_adapters(base)}
    assert "leads out" in reasons["linked-files"]
    assert "leads out" in reasons["linked-folder"]
    assert reasons["loop"] != "None"


def test_a_link_within_the_folder_is_another_name_of_the_same_version(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "base" / "v2")
    (tmp_path / "base" / "latest").symlink_to(folder)
    latest, second = read_adapters(tmp_path / "base")
    assert latest.is_usable
    assert (latest.name, latest.version) == ("latest", second.version)


def test_what_is_no_regular_file_is_refused_and_never_opened(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "pipe")
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    assert read_one(folder).reason == "adapter_model.safetensors is not a regular file"


@pytest.mark.parametrize(
    ("fields", "tensors"),
    [
        ({}, pair()),
        ({"use_rslora": True}, pair(dtype="float16")),
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"^model.layers.0": 1.5}}, pair(rank=2)),
        ({"use_dora": True}, {**pair(), MAGNITUDE: array(5)}),
        ({"use_dora": True}, {**pair(), f"{MAGNITUDE}.weight": array(5)}),
        ({"fan_in_fan_out": True, "init_lora_weights": "gaussian", "lora_bias": False}, pair()),
        ({"layers_to_transform": [0], "layers_pattern": "layers", "exclude_modules": ["k_proj"]}, pair()),
    ],
)
def test_all_that_the_engine_computes_is_accepted(fields: dict[str, Any], tensors: Any, tmp_path: Path) -> None:
    record = read_one(write_adapter(tmp_path / "sound", config=config(**fields), weights=tensors))
    assert record.reason is None
    [(module, change)] = record.changes.items()
    assert f"base_model.model.{module}" == MODULE
    assert {change.down, change.up, change.magnitude} - {None} == set(tensors)
    assert (change.inputs, change.outputs) == (6, 5)
    assert record.rank == tensors[A].shape[0]


def test_a_broken_adapter_does_not_hide_its_neighbours(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    write_adapter(tmp_path / "b", config="{")
    write_adapter(tmp_path / "c")
    (tmp_path / "README.md").write_text("not an adapter")
    (tmp_path / ".cache").mkdir()
    assert [(card.name, card.is_usable) for card in read_adapters(tmp_path)] == [("a", True), ("b", False), ("c", True)]


def test_a_base_without_a_folder_has_no_adapters(tmp_path: Path) -> None:
    assert read_adapters(tmp_path / "missing") == ()


def test_the_version_changes_with_every_file_and_with_nothing_else(tmp_path: Path) -> None:
    first, same = read_one(write_adapter(tmp_path / "1" / "x")), read_one(write_adapter(tmp_path / "2" / "y"))
    other_config = read_one(write_adapter(tmp_path / "3" / "x", config=config(lora_alpha=9)))
    weights = {name: tensor * 2 for name, tensor in pair().items()}
    other_weights = read_one(write_adapter(tmp_path / "4" / "x", weights=weights))
    assert first.version == same.version
    assert len({first.version, other_config.version, other_weights.version}) == 3
    assert len(first.version) >= 16


UNCHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # one folder does for all examples


def test_a_record_crosses_processes(tmp_path: Path) -> None:
    record = read_one(write_adapter(tmp_path / "sound"))
    assert pickle.loads(pickle.dumps(record)) == record
    assert pickle.loads(pickle.dumps(record.card())) == record.card()


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=UNCHECKED)
@given(place=st.integers(0, 400), byte=st.integers(0, 255), num_kept=st.none() | st.integers(0, 400))
def test_no_damage_to_the_weights_raises(place: int, byte: int, num_kept: int | None, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    if not folder.exists():
        write_adapter(folder)
    data = bytearray(save(pair()))
    data[place % len(data)] = byte
    (folder / "adapter_model.safetensors").write_bytes(bytes(data[:num_kept]))
    record = read_one(folder)
    assert record.is_usable or record.reason


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=UNCHECKED)
@given(
    fields=st.dictionaries(
        st.sampled_from([*SOUND_CONFIG, "use_rslora", "init_lora_weights", "fan_in_fan_out"]),
        st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), st.lists)
        | st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=3), max_size=3),
    )
)
def test_no_config_raises(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    if not folder.exists():
        write_adapter(folder)
    (folder / "adapter_config.json").write_text(json.dumps({**SOUND_CONFIG, **fields}))
    record = read_one(folder)
    assert record.is_usable or record.reason


@pytest.mark.parametrize("name", ["json", "pirate", "shout"])
def test_the_embedded_adapters_are_usable(name: str) -> None:
    cards = {card.name: card for card in read_adapters(ROOT / "adapters" / "demo")}
    if name not in cards:
        pytest.skip("not trained here")
    assert cards[name].is_usable, cards[name].reason
    assert cards[name].rank > 0


def test_adapters_trained_with_peft_are_usable() -> None:
    folder = ROOT / ".." / "shared" / "models"
    cards = [card for card in read_adapters(folder) if "-lora-" in card.name]
    if not cards:
        pytest.skip("the adapters are not here")
    assert [card.reason for card in cards] == [None] * len(cards)
    assert all(card.rank in (8, 16) for card in cards)
