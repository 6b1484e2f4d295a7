"""Model folders: what is read of a sound one, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save

from serve_app.catalog.files import CatalogError
from serve_app.catalog.models import locate_model, read_model_folder
from serve_app.engine.decoder.quantized_formats import open_slices
from tests.catalog.zoo import array

MODELS = Path(__file__).resolve().parents[2] / ".." / "shared" / "models"
SOUND: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 64,
    "vocab_size": 9,
}


def write_model(folder: Path, *, config: dict[str, Any] = SOUND, weights: str | None = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    if weights is not None:
        (folder / weights).write_bytes(save({"w": array(9, 2)}))
        os.utime(folder / weights, (1_700_000_000, 1_700_000_000))
    return folder


def test_a_sound_folder_is_read(tmp_path: Path) -> None:
    model = read_model_folder(write_model(tmp_path))
    assert (model.path, model.weights, model.created) == (tmp_path, (tmp_path / "model.safetensors",), 1_700_000_000)


def test_every_shard_of_the_weights_is_found_once(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        write_model(tmp_path, weights=name)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = read_model_folder(tmp_path)
    assert [file.name for file in model.weights] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl"])
def test_pickled_weights_are_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=f"{name} is a pickle, which could run code: convert to safetensors: python"):
        read_model_folder(write_model(tmp_path, weights=name))


LEFT_ALONE = ("consolidated.safetensors", "model-00001-of-00009.safetensors", "pytorch_model.bin", "model.gguf")


@pytest.mark.parametrize(
    ("files", "settings", "read"),
    [
        (["model.safetensors"], {}, ["model.safetensors"]),
        (["a.safetensors", "b.safetensors", "index"], {}, ["a.safetensors", "b.safetensors"]),
        (["model.safetensors", "a.safetensors", "b.safetensors", "index"], {}, ["model.safetensors"]),
        (["sub/a.safetensors", "sub/b.safetensors", "index"], {}, ["sub/a.safetensors", "sub/b.safetensors"]),
        (["model.safetensors", "own.safetensors"], {"transformers_weights": "own.safetensors"}, ["own.safetensors"]),
    ],
)
def test_files_that_hold_no_weights_of_the_model_are_left_alone(
    files: list[str], settings: dict[str, str], read: list[str], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "snapshot", config={**SOUND, **settings}, weights=None)
    for name in LEFT_ALONE:
        (folder / name).write_bytes(b"what no one can read")
    stored = [name for name in files if name != "index"]
    for name in stored:
        (folder / name).parent.mkdir(exist_ok=True)
        (tmp_path / name.replace("/", "-")).write_bytes(save({name: array(9, 2)}))
        (folder / name).symlink_to(tmp_path / name.replace("/", "-"))  # as caches keep them
    if "index" in files:
        index = {"weight_map": {name: name for name in stored if name != "model.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_model_folder(folder).weights == tuple(folder / name for name in read)
    assert sorted(open_slices(folder)) == read


@pytest.mark.parametrize("name", ["../other.safetensors", "/other.safetensors", "weights.bin"])
def test_weights_are_named_inside_the_folder_or_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"transformers_weights: .* is not the name of a safetensors file"):
        read_model_folder(write_model(tmp_path, config={**SOUND, "transformers_weights": name}))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    (write_model(tmp_path) / name).unlink()
    with pytest.raises(CatalogError, match=name):
        read_model_folder(tmp_path)


def test_weights_cut_off_in_the_middle_are_refused(tmp_path: Path) -> None:
    file = write_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CatalogError, match="the file is damaged"):
        read_model_folder(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"x": "../secret.safetensors"}, "not the name of a safetensors file in the folder"),
        ({"x": "model.bin"}, "not the name of a safetensors file"),
        ({"x": "gone.safetensors"}, "gone.safetensors is missing"),
        ({}, "weight_map is missing or empty"),
    ],
)
def test_an_index_may_only_name_files_beside_it(weight_map: dict[str, str], reason: str, tmp_path: Path) -> None:
    write_model(tmp_path, weights=None)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CatalogError, match=reason):
        read_model_folder(tmp_path)


def test_the_builtin_model_is_packaged_and_others_are_refused_by_name() -> None:
    assert locate_model("builtin:demo").parts[-3:] == ("serve_app", "demo", "model")
    with pytest.raises(CatalogError, match="'builtin:other' is built in; allowed: builtin:demo"):
        locate_model("builtin:other")


def test_a_model_that_is_no_local_folder_is_refused(tmp_path: Path) -> None:
    assert locate_model(str(tmp_path)) == tmp_path.resolve()
    with pytest.raises(CatalogError, match="'org/name' is not a folder"):
        locate_model("org/name")


def test_the_builtin_model_is_read() -> None:
    model = read_model_folder(locate_model("builtin:demo"))
    assert [file.name for file in model.weights] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["stories260K", "sort-gpt2", "tinystories-656K", "babyllama-105"])
def test_models_from_elsewhere_are_read(name: str) -> None:
    if not (MODELS / name).is_dir():
        pytest.skip(f"{name} is not here")
    assert read_model_folder(MODELS / name).weights
