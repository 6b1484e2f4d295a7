"""Adapters on disk: the sound ones are read, each broken one is listed with its reason."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from safetensors.torch import load_file

from serve_app.catalog.adapters import read_records
from serve_app.catalog.files import CatalogError
from serve_app.core.cards import AdapterRecord
from tests.catalog.zoo import MODULE, SOUND_CONFIG, entry, pair, raw_file, write_adapter

ROOT = Path(__file__).resolve().parents[2]
A, B = f"{MODULE}.lora_A.weight", f"{MODULE}.lora_B.weight"


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
    "another method": (config(peft_type="IA3"), "found 'IA3'; merge it into its base"),
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
    "integers": (save(pair(dtype="int32")), "is int32; allowed are bfloat16, float16, float32, float64"),
    "a long name": (raw_file({"a" * 513: entry([1], 0, 4)}, b"\0" * 4), "a name of 513 characters"),
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


@pytest.mark.parametrize("name", ["a+b", "a*0.5", "*"])
def test_a_name_that_would_be_a_mix_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    reason = str(read_one(write_adapter(tmp_path / name)).reason)
    assert f"the name {name!r} is not allowed, as * and + mix adapters in an address" in reason


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("adapter_model.bin", "torch.load('adapter_model.bin', map_location='cpu', weights_only=True)"),
        ("adapter_model.pt", "torch.load('adapter_model.pt', map_location='cpu', weights_only=True)"),
        ("adapters.safetensors", "mlx_lm.fuse"),
        ("model.safetensors", "name its folder as `path` of a model of its own"),
    ],
)
def test_weights_of_another_layout_are_refused_with_the_way_out(name: str, way_out: str, tmp_path: Path) -> None:
    """Adapters in `.bin` are pickles, which run code where they are read."""
    folder = write_adapter(tmp_path / "other")
    (folder / "adapter_model.safetensors").rename(folder / name)
    assert way_out in str(read_one(folder).reason)


@pytest.mark.slow
def test_the_command_that_a_pickle_is_refused_with_converts_it(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "pickled")
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    torch.save(tensors, folder / "adapter_model.bin")
    weights.unlink()
    command = str(read_one(folder).reason).partition('convert it: python -c "')[2].removesuffix('"')
    subprocess.run([sys.executable, "-c", command], cwd=folder, check=True)
    assert read_one(folder).reason is None
    assert load_file(weights).keys() == tensors.keys()


@pytest.mark.parametrize("inner", ["checkpoint-500", "default", "run/checkpoint-500"])
def test_an_adapter_in_a_folder_within_is_named(inner: str, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapters" / "a" / inner)
    [record] = read_records(tmp_path / "adapters")
    assert f"there is one in {inner!r}: move that folder into 'adapters'" in str(record.reason)


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
    [card] = read_records(tmp_path)
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
    reasons = {card.name: str(card.reason) for card in read_records(base)}
    assert "leads out" in reasons["linked-files"]
    assert "leads out" in reasons["linked-folder"]
    assert reasons["loop"] != "None"


def test_a_link_within_the_folder_is_another_name_of_the_same_version(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "base" / "v2")
    (tmp_path / "base" / "latest").symlink_to(folder)
    latest, second = read_records(tmp_path / "base")
    assert latest.is_usable
    assert (latest.name, latest.version) == ("latest", second.version)


def test_what_is_no_regular_file_is_refused_and_never_opened(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "pipe")
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    assert read_one(folder).reason == "adapter_model.safetensors is not a regular file"


def test_a_broken_adapter_does_not_hide_its_neighbours(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    write_adapter(tmp_path / "b", config="{")
    write_adapter(tmp_path / "c")
    (tmp_path / "README.md").write_text("not an adapter")
    (tmp_path / ".cache").mkdir()
    assert [(card.name, card.is_usable) for card in read_records(tmp_path)] == [("a", True), ("b", False), ("c", True)]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="missing' is no folder; `adapters` names a folder with one folder for each"):
        read_records(tmp_path / "missing")


def test_a_folder_that_is_an_adapter_itself_is_an_error_that_names_the_one_around_it(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "base" / "a")
    with pytest.raises(CatalogError, match=f"names the folder around it: {str(tmp_path / 'base')!r}"):
        read_records(folder)


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
@settings(max_examples=100, deadline=None, suppress_health_check=UNCHECKED)
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
@settings(max_examples=60, deadline=None, suppress_health_check=UNCHECKED)
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
    cards = {card.name: card for card in read_records(ROOT / "adapters" / "demo")}
    if name not in cards:
        pytest.skip("not trained here")
    assert cards[name].is_usable, cards[name].reason
    assert cards[name].card().rank > 0


def test_adapters_trained_with_peft_are_usable() -> None:
    folder = ROOT / ".." / "shared" / "models"
    cards = [card for card in read_records(folder) if "-lora-" in card.name]
    if not cards:
        pytest.skip("the adapters are not here")
    assert [card.reason for card in cards] == [None] * len(cards)
    assert all(card.card().rank in (8, 16) for card in cards)
