"""One folder is judged by itself: what a model or an adapter lacks is said before anything serves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve_app.catalog.files import CatalogError
from serve_app.check.folders import check_adapters, check_model_folder

ADAPTERS = Path(__file__).parents[2] / "adapters" / "demo"


def test_a_model_is_told_with_its_size_and_context() -> None:
    found = check_model_folder("builtin:demo", dtype="float32")
    assert found.reason is None
    assert found.facts["max_model_len"] == 2048
    assert found.facts["engine"] == "own"
    assert "`engine: own` is advised" in found.notes[-1]
    half = check_model_folder("builtin:demo", dtype="bfloat16").facts["weight_bytes"]
    assert isinstance(half, int)
    assert 0 < half < int(str(found.facts["weight_bytes"]))


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "config.json is missing"),
        ({"config.json": "{}", "tokenizer.json": "{}", "pytorch_model.bin": ""}, "is a pickle"),
    ],
)
def test_a_model_that_cannot_be_served_is_told_why(tmp_path: Path, files: dict[str, str], told: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    found = check_model_folder(str(tmp_path), dtype="auto")
    assert found.reason is not None
    assert told in found.reason


def test_each_adapter_of_a_folder_is_judged_and_one_alone_too() -> None:
    several = check_adapters(str(ADAPTERS), "builtin:demo")
    assert [(each.name, each.reason) for each in several] == [("json", None), ("pirate", None), ("shout", None)]
    (alone,) = check_adapters(str(ADAPTERS / "pirate"), "builtin:demo")
    assert alone == several[1]


def test_an_adapter_of_another_model_is_told_from_one_that_fits(tmp_path: Path) -> None:
    folder = tmp_path / "demo" / "broken"
    folder.mkdir(parents=True)
    config = json.loads((ADAPTERS / "pirate" / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": config["r"] * 2}))
    (folder / "adapter_model.safetensors").write_bytes((ADAPTERS / "pirate" / "adapter_model.safetensors").read_bytes())
    (found,) = check_adapters(str(tmp_path / "demo"), "builtin:demo")
    assert found.reason is not None
    assert "rank" in found.reason
    (alone,) = check_adapters(str(tmp_path / "demo"))
    assert (alone.reason, alone.notes) == (None, ("whether it fits a model is said with --model FOLDER",))


@pytest.mark.parametrize(
    ("path", "told"), [("nowhere", "is no folder"), (str(ADAPTERS.parent.parent / "notebooks"), "holds no adapter")]
)
def test_where_there_is_no_adapter_that_is_said(path: str, told: str) -> None:
    with pytest.raises(CatalogError, match=told):
        check_adapters(path)
