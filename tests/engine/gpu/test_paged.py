"""Attention by kernels over pages is the attention of torch's operations over the same pages, gathered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
from torch import Tensor

from serve_app.engine.kv.pages import PageStorage
from serve_app.engine.kv.storage import Holding, Reading
from serve_app.kernels.forms import Scoring, Tiles

pytest.importorskip("triton", reason="its kernels can be neither compiled nor interpreted")

from serve_app.engine.kv.pages import PagedPlan, lay_tiles, plan_paged
from serve_app.kernels.gpu.paged import write
from tests.engine.harness import uniform

pytestmark = pytest.mark.slow

BLOCK_SIZE = 4
NUM_BLOCKS = 80
SPLIT = 16


@dataclass(kw_only=True)
class Case:
    """A step over pages that hold random numbers, those nobody may read among them no numbers at all."""

    device: torch.device
    spans: list[tuple[int, int]]
    heads: int = 6
    kv_heads: int = 2
    key_dim: int = 20
    value_dim: int = 12
    readings: list[Reading] = field(default_factory=list)
    places: Tensor = field(default_factory=lambda: torch.zeros(0))

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)
        free = torch.randperm(NUM_BLOCKS, generator=self.generator).tolist()
        places: list[int] = []
        storage = self.storage("torch")
        for number, (start, length) in enumerate(self.spans):
            blocks = [free.pop() for _ in range(-(-(start + length) // BLOCK_SIZE))]
            reading = Reading(first_token=len(places), place=number, blocks=blocks, start=start, length=length)
            self.readings.append(reading)
            places += storage.places(Holding(number, blocks=blocks), start, start + length)
        self.places = torch.tensor(places, device=self.device)

    def storage(self, kernels: Literal["triton", "torch"]) -> PageStorage:
        """Pages with the same numbers at every call."""
        layer = {"heads": self.kv_heads, "key_dim": self.key_dim, "value_dim": self.value_dim}
        storage = PageStorage(
            uniform(layers=1, **layer),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            dtype=torch.float32,
            device=self.device,
            kernels=kernels,
            max_model_len=128,
        )
        generator = torch.Generator().manual_seed(11)
        for tensor in (storage._keys[0], storage._values[0]):
            tensor[:-1] = torch.randn(tensor[:-1].shape, generator=generator).to(self.device)
        return storage

    def new(self, heads: int, dim: int) -> Tensor:
        """Random [tokens, heads, dim], laid out as transformers' models hand it on."""
        random = torch.randn(heads, len(self.places), dim, generator=self.generator)
        return random.to(self.device).transpose(0, 1)


STEP = [(0, 1), (16, 1), (62, 7), (39, 1), (3, 30), (69, 1)]


@pytest.mark.parametrize(
    "beyond",
    [
        {},
        {"window": 9},
        {"window": 16, "sinks": True},
        {"chunk": 16},
        {"softcap": 2.0},
        {"softcap": 2.0, "window": 9, "sinks": True},
    ],
    ids=lambda beyond: ",".join(beyond) or "plain",
)
def test_kernels_give_what_gathered_pages_give(beyond: dict[str, float | bool], device: torch.device) -> None:
    case = Case(device=device, spans=STEP)
    query, key, value = case.new(6, 20), case.new(2, 20), case.new(2, 12)
    sinks = torch.randn(6, generator=case.generator).to(device) if "sinks" in beyond else None
    scoring = Scoring(scale=0.3, sinks=sinks, **{name: beyond[name] for name in beyond if name != "sinks"})  # type: ignore[arg-type]
    gathered, followed = case.storage("torch"), case.storage("triton")
    expected = gathered.plan(case.readings, case.places).run(0, query, key, value, scoring=scoring)
    plan = plan_paged(followed._keys, followed._values, case.readings, case.places, split=SPLIT)
    found = plan.run(0, query, key, value, scoring=scoring)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(followed._keys[0], gathered._keys[0])
    assert torch.equal(followed._values[0], gathered._values[0])


def test_one_key_head_for_all_heads_and_one_for_each(device: torch.device) -> None:
    for heads, kv_heads in ((5, 1), (2, 2)):
        case = Case(device=device, spans=[(20, 1), (0, 6)], heads=heads, kv_heads=kv_heads, key_dim=8, value_dim=16)
        query, key, value = case.new(heads, 8), case.new(kv_heads, 8), case.new(kv_heads, 16)
        expected, found = (
            case.storage(kernels).plan(case.readings, case.places).run(0, query, key, value, scoring=Scoring(scale=0.5))
            for kernels in ("torch", "triton")
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_row_has_every_bit_that_it_has_alone(device: torch.device) -> None:
    case = Case(device=device, spans=[(50, 1), (5, 1), (70, 1)])
    query = case.new(6, 20)
    storage = case.storage("triton")
    together = _attend(storage, case.readings, case.places, query)
    for number, reading in enumerate(case.readings):
        alone = Reading(first_token=0, place=0, blocks=reading.blocks, start=reading.start, length=1)
        row = slice(number, number + 1)
        assert torch.equal(_attend(storage, [alone], case.places[row], query[row])[0], together[number])


def _attend(storage: PageStorage, readings: list[Reading], places: Tensor, query: Tensor) -> Tensor:
    """Attend to what is there already, in splits of SPLIT."""
    plan = plan_paged(storage._keys, storage._values, readings, places, split=SPLIT)
    return plan.run(0, query, None, None, scoring=Scoring(scale=0.3))


def test_rows_of_nobody_write_nothing_and_give_zeros(device: torch.device) -> None:
    case = Case(device=device, spans=[(50, 1), (5, 1), (0, 1)])
    tiles = lay_tiles(case.readings, places=case.places, block_size=BLOCK_SIZE)
    singles, places = tiles.singles.clone(), tiles.places.clone()
    singles[2:, 2], places[2] = 0, -1
    storage, before = case.storage("triton"), case.storage("triton")
    padded = Tiles(places=places, tables=tiles.tables, singles=singles, chunks=tiles.chunks)
    plan = PagedPlan(storage._keys, storage._values, padded, max_keys=51, split=SPLIT)
    key, value = case.new(2, 20), case.new(2, 12)
    output = plan.run(0, case.new(6, 20), key, value, scoring=Scoring(scale=0.3))
    assert not output[2].any()
    assert output[:2].abs().amin(dim=(1, 2)).gt(0).all()
    write(before._keys[0], before._values[0], case.places[:2], key[:2], value[:2])
    assert torch.equal(storage._keys[0], before._keys[0])
    assert torch.equal(storage._values[0], before._values[0])
