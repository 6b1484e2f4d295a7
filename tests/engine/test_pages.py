"""Pages of keys and values: what they take is what the budget says, and blocks are cleared in few launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from serve_app.engine.decoder.layout import BackgroundDowncast
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.kv.pages import PageStorage, stretches_of
from serve_app.engine.kv.storage import KeyValueShape, LayerShape
from serve_app.engine.kv.store import make_store
from tests.engine.harness import config, uniform

SHAPES = {
    "half a billion": uniform(layers=24, heads=2, key_dim=64, value_dim=64),
    "eight billion": uniform(layers=32, heads=8, key_dim=128, value_dim=128),
    "keys of another size": uniform(layers=27, heads=16, key_dim=192, value_dim=128),
    "layers that differ": KeyValueShape(
        layers=(LayerShape(heads=8, key_dim=256, value_dim=256), LayerShape(heads=1, key_dim=80, value_dim=80)) * 3
    ),
}


@pytest.mark.law("Budget")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kv_cache_bytes", [64 << 20, (1 << 30) - 1, 7 * 10**9])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_pages_take_the_budget_and_no_more_than_the_page_of_zeros_beside_it(
    shape: KeyValueShape, kv_cache_bytes: int, dtype: torch.dtype
) -> None:
    module = torch.nn.Identity()
    model = LoadedModel(
        module=module,  # at which a store of pages does not look
        shape=shape, dtype=dtype, device=torch.device("meta"), max_model_len=4096, kv_cache_bytes=kv_cache_bytes,
        vocab_size=100, eos_token_ids=frozenset(), downcast=BackgroundDowncast(module),
    )  # fmt: skip
    settings = config("nowhere")
    store = make_store(settings, model)
    assert isinstance(store.storage, PageStorage)
    taken = sum(pool.nbytes for pool in store.storage._pools.values())
    block_bytes = shape.bytes_per_token(dtype) * settings.block_size
    assert taken == (store.num_blocks + 1) * block_bytes <= kv_cache_bytes + block_bytes
    assert store.num_blocks * block_bytes > kv_cache_bytes - block_bytes
    holding = store.open()
    assert store.reserve(holding, store.num_blocks * settings.block_size)  # the ledger gives out all of it
    assert max(holding.blocks) < store.storage.padding
    assert not store.can_reserve(1)


class Fills(TorchDispatchMode):
    """Counts what is launched to clear pages."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "index_fill" in str(func)
        return func(*args, **(kwargs or {}))


SIZES = [("eight billion", 1), ("keys of another size", 2), ("layers that differ", 2)]


@pytest.mark.parametrize(("name", "most"), SIZES)
def test_pages_are_cleared_in_one_launch_for_each_size_of_heads_and_not_for_each_layer(name: str, most: int) -> None:
    storage = PageStorage(SHAPES[name], num_blocks=4, block_size=2, dtype=torch.float32, device=torch.device("cpu"))
    pages = [*storage._keys, *storage._values]
    sizes = [(each.heads, each.key_dim) for each in SHAPES[name].layers]
    assert [tuple(each.shape[2:]) for each in storage._keys] == sizes
    with Fills() as fills:
        storage.claim([1, 3])
    assert fills.count == 0, "what nobody had is zeros"
    for each in pages:
        each.fill_(1.0)
    with Fills() as fills:
        storage.claim([1, 3])
    assert fills.count == most
    for each in pages:
        assert [bool(page.any()) for page in each] == [True, False, True, False, True]


def test_neighbours_are_given_back_together() -> None:
    assert stretches_of([7, 3, 8, 4, 5, 1]) == [(1, 2), (3, 6), (7, 9)]
    assert stretches_of([]) == []
