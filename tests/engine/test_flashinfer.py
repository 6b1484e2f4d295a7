"""What FlashInfer is asked for: a wrapper in torch that knows nothing but its own arguments gives what pages give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_app.engine.kv.pages import FlashInfer, PageStorage, lay_indices
from serve_app.engine.kv.storage import Holding, Reading, attend
from serve_app.kernels.forms import Scoring
from tests.engine.conftest import DEMO
from tests.engine.harness import complete, config, make_engine, request, uniform

BLOCK_SIZE, NUM_BLOCKS = 4, 60
SPANS = [(0, 1), (16, 1), (39, 7), (3, 13), (7, 1), (8, 4)]


class PlainWrapper:
    """As FlashInfer's documentation says what its arguments mean. num_planned, num_run: calls"""

    def __init__(self) -> None:
        self.num_planned = self.num_run = 0

    def plan(self, **told: Any) -> None:
        self.num_planned += 1
        for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len"):
            assert told[name].device.type == "cpu", "it would be waited for"
            assert told[name].dtype == torch.int32
        assert told["causal"]
        self._told = told

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        self.num_run += 1
        told = self._told
        assert q.is_contiguous()
        assert q.shape[1:] == (told["num_qo_heads"], told["head_dim_qk"])
        assert (q.dtype, paged_kv_cache[0].dtype) == (told["q_data_type"], told["kv_data_type"])
        assert paged_kv_cache[0].shape[1:] == (told["page_size"], told["num_kv_heads"], told["head_dim_qk"])
        output = torch.full_like(q, torch.nan)
        for number in range(len(told["paged_kv_last_page_len"])):
            tokens = slice(*told["qo_indptr"][number : number + 2].tolist())
            output[tokens] = self._sequence(number, q[tokens], paged_kv_cache)
        return output

    def _sequence(self, number: int, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        told = self._told
        pages = told["paged_kv_indices"][slice(*told["paged_kv_indptr"][number : number + 2].tolist())].long()
        num_keys = (len(pages) - 1) * told["page_size"] + int(told["paged_kv_last_page_len"][number])
        keys, values = (each[pages].flatten(0, 1)[:num_keys] for each in paged_kv_cache)
        queries, seen = torch.arange(num_keys - len(q), num_keys)[:, None], torch.arange(num_keys)
        hidden = seen > queries
        if told["window_left"] >= 0:
            hidden |= seen < queries - told["window_left"]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[None, None]
        cap = told["logits_soft_cap"] or None
        return attend(q[None], keys[None], values[None], mask=mask, scale=told["sm_scale"], softcap=cap)[0]


class Case:
    """A step over pages of random numbers."""

    def __init__(self, spans: list[tuple[int, int]], *, value_dim: int = 16) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.shape = uniform(layers=1, heads=2, key_dim=16, value_dim=value_dim)
        free = torch.randperm(NUM_BLOCKS, generator=self.generator).tolist()
        self.readings: list[Reading] = []
        places: list[int] = []
        storage = self.storage(None)
        for number, (start, length) in enumerate(spans):
            blocks = [free.pop() for _ in range(-(-(start + length) // BLOCK_SIZE) + number % 2)]  # one more is held
            reading = Reading(first_token=len(places), place=number, blocks=blocks, start=start, length=length)
            self.readings.append(reading)
            places += storage.places(Holding(number, blocks=blocks), start, start + length)
        self.places = torch.tensor(places)
        self.query, self.key, self.value = (
            torch.randn(heads, len(places), dim, generator=self.generator).transpose(0, 1)
            for heads, dim in ((6, 16), (2, 16), (2, value_dim))
        )

    def storage(self, flashinfer: FlashInfer | None) -> PageStorage:
        storage = PageStorage(
            self.shape, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu"),
            flashinfer=flashinfer,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(5)
        for tensor in (storage._keys[0], storage._values[0]):
            tensor[:-1] = torch.randn(tensor[:-1].shape, generator=generator)
        return storage

    def run(self, storage: PageStorage, *scorings: Scoring) -> Tensor:
        plan = storage.plan(self.readings, self.places)
        return torch.stack([plan.run(0, self.query, self.key, self.value, scoring=each) for each in scorings])


@pytest.mark.parametrize("beyond", [{}, {"window": 9}, {"window": 1}, {"softcap": 2.0}], ids=str)
def test_its_arguments_say_what_the_block_tables_say(beyond: dict[str, Any]) -> None:
    wrapper, case, scoring = PlainWrapper(), Case(SPANS), Scoring(scale=0.3, **beyond)
    ours, theirs = case.storage(None), case.storage(FlashInfer(lambda: wrapper))
    torch.testing.assert_close(case.run(theirs, scoring), case.run(ours, scoring), rtol=1e-4, atol=1e-5)
    assert wrapper.num_run == 1
    for one, other in ((ours._keys, theirs._keys), (ours._values, theirs._values)):
        assert torch.equal(one[0], other[0])


def test_layers_are_planned_once_for_each_way_of_scoring() -> None:
    wrappers: list[PlainWrapper] = []

    def make() -> PlainWrapper:
        wrappers.append(PlainWrapper())
        return wrappers[-1]

    case, narrow, wide = Case(SPANS), Scoring(scale=0.3, window=5), Scoring(scale=0.3)
    storage = case.storage(FlashInfer(make))
    expected = case.run(case.storage(None), wide, narrow, replace(wide), narrow, wide)
    for _ in range(2):
        torch.testing.assert_close(case.run(storage, wide, narrow, replace(wide), narrow, wide), expected)
    assert [each.num_planned for each in wrappers] == [2, 2]
    assert [each.num_run for each in wrappers] == [6, 4]


@pytest.mark.parametrize("beyond", [{"chunk": 8}, {"sinks": torch.ones(6)}, {}], ids=["chunk", "sinks", "value size"])
def test_layers_that_it_does_not_know_are_computed_by_others(beyond: dict[str, Any]) -> None:
    wrapper, case, scoring = PlainWrapper(), Case(SPANS, value_dim=16 if beyond else 12), Scoring(scale=0.3, **beyond)
    found = case.run(case.storage(FlashInfer(lambda: wrapper)), scoring)
    torch.testing.assert_close(found, case.run(case.storage(None), scoring))
    assert wrapper.num_run == 0


def test_the_last_page_has_a_position_at_least() -> None:
    readings = [Reading(first_token=0, place=0, blocks=[7, 8, 9], start=7, length=1)]
    found = lay_indices(readings, block_size=4, device=torch.device("cpu"))
    names = ("paged_kv_indices", "paged_kv_last_page_len", "paged_kv_indptr")
    assert [found[name].tolist() for name in names] == [[7, 8], [4], [0, 2]]


@pytest.mark.slow
def test_an_engine_over_it_gives_the_same_texts() -> None:
    wrapper = PlainWrapper()
    plain, own = (make_engine(config(DEMO, kernels="torch")) for _ in range(2))
    own._store.storage._flashinfer = FlashInfer(lambda: wrapper)  # type: ignore[attr-defined]
    wanted = [(request(f"{number}", max_tokens=6), [40 + number] * (1 + 20 * number)) for number in range(4)]
    expected, found = (complete(engine, wanted) for engine in (plain, own))
    assert {name: each.text for name, each in found.items()} == {name: each.text for name, each in expected.items()}
    assert wrapper.num_planned == own.num_steps
