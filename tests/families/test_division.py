"""How models of the loop's families are divided: the parts are the whole, or the model is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve_app.engine.decoder.config_check import check_config, held_bytes, shapes_of
from serve_app.engine.decoder.loading import read_module
from serve_app.engine.decoder.text_part import ModelNotSupported
from serve_app.engine.tensor_parallel.division import Division, divide
from tests.engine.harness import config
from tests.families.families import Family
from tests.families.making import save_model
from tests.families.test_loop import IN_TABLE
from tests.families.test_parity import whole_model

NORMS_ROWS = {"olmo2", "olmo3"}


@pytest.mark.parametrize("model", IN_TABLE, ids=lambda model: model.label)
def test_every_family_of_the_loop_is_divided_or_refused_by_name(
    model: Family, model_folder: Callable[[Family], Path]
) -> None:
    checked = check_config(model_folder(model))
    if model.name in NORMS_ROWS:
        with pytest.raises(ModelNotSupported, match=r"q_norm.weight .* all heads share it"):
            divide(checked, 2)
        return
    division = divide(checked, 2)
    part, whole = (held_bytes(shapes_of(each)) for each in (division.narrowed(checked), checked))
    assert part < whole


@pytest.mark.law("Shards")
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    ("name", "stored"), [("llama", torch.float32), ("llama", torch.bfloat16), ("phi3", torch.float32)]
)
def test_the_parts_that_shards_read_are_the_whole(name: str, stored: torch.dtype, count: int, tmp_path: Path) -> None:
    """With as many shards as heads of keys, and with twice as many; linears that are joined in the file, too."""
    biases = {"attention_bias": True, "mlp_bias": True} if name == "llama" else {}
    save_model(name, biases, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({key: each.to(stored) for key, each in load_file(file).items()}, file, metadata={"format": "pt"})
    checked = check_config(tmp_path)
    divisions = [divide(checked, count, number=number) for number in range(count)]
    shards = [
        read_module(config(tmp_path), each.narrowed(checked), torch.float32, each).state_dict() for each in divisions
    ]
    for key, weight in whole_model(tmp_path).state_dict().items():
        parts = [shard[key] for shard in shards]
        assert {each.dtype for each in parts} == {torch.float32}
        assert torch.equal(put_together(key, parts, divisions, weight), weight), key


def put_together(key: str, parts: list[Tensor], divisions: list[Division], like: Tensor) -> Tensor:
    module, _, kind = key.rpartition(".")
    cuts = [each.cut(module) for each in divisions]
    if cuts[0] is None:
        return parts[0]
    if kind == "bias" and cuts[0].along == "inputs":
        return torch.stack(parts).sum(0)
    whole = torch.full_like(like, torch.nan)
    dim = 0 if cuts[0].along == "outputs" else 1
    for part, cut in zip(parts, cuts, strict=True):
        assert cut is not None
        at = torch.cat([torch.arange(begin, end) for begin, end in cut.ranges])
        whole.index_copy_(dim, at, part)
    return whole
