"""Steps by graphs, through a stand-in that computes the same again from the same tensors: as steps without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from serve_app.core.request import LogprobParams, SamplingParams
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.graphs import BlockTables, DecodeGraphs, DecodeRows, Replay, sizes_up_to
from serve_app.engine.decoder.step import Layout
from serve_app.engine.engine import Engine
from serve_app.engine.kv.storage import Reading
from serve_app.engine.lora.plan import Mix, Resident, lay_rows, lay_tiles
from serve_app.kernels.cpu.low_rank import low_rank_kernels
from tests.engine.adapter_files import save_adapter
from tests.engine.conftest import DEMO
from tests.engine.gathered import GatheringRunner
from tests.engine.harness import Outcome, complete, config, make_engine, request, sequences

pytestmark = pytest.mark.slow

needs_kernels = pytest.mark.skipif(low_rank_kernels(torch.float32) is None, reason="adapters are torch's here")
CPU = torch.device("cpu")


class Recorded:
    """In the place of CUDA's graphs. What is replayed is computed anew, into the tensor of the first time, as a graph
    would; so what it reads elsewhere than in tensors that stay, or what is kept of its result, is seen to be wrong.

    num_replayed: by number of rows; without the first of each, which is compared
    """

    def __init__(self, *, fails_at: int = 1 << 30, errs: float = 0.0) -> None:
        self.num_replayed: dict[int, int] = {}
        self.num_captured = 0
        self.results: list[Tensor] = []
        self._fails_at = fails_at
        self._errs = errs

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        self.num_captured += 1
        if self.num_captured == self._fails_at:
            raise RuntimeError("the driver is of another mind")
        result, compared = compute(), []
        self.results.append(result)

        def replay() -> Tensor:
            if compared:
                self.num_replayed[len(result)] = self.num_replayed.get(len(result), 0) + 1
            compared.append(True)
            return result.copy_(compute() + self._errs)

        return replay


def paged(**changes: object) -> EngineConfig:
    return config(DEMO, kernels="torch", **changes)


def endless(settings: EngineConfig) -> Engine:
    """Whose texts end where they have to."""
    return make_engine(settings, eos_token_ids=frozenset(), runner=GatheringRunner)


def recording(settings: EngineConfig, recorded: Recorded) -> Engine:
    engine = endless(settings)
    engine._runner.record_steps(recorded, num_places=settings.max_num_sequences)
    return engine


def graphs_of(engine: Engine) -> DecodeGraphs:
    assert engine._runner.graphs is not None
    return engine._runner.graphs


def strong_adapters(folder: Path) -> dict[str, Path]:
    """Write adapters of two shelves' ranks."""
    module = AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True)
    return {
        name: save_adapter(folder / name, module, rank=rank, seed=seed, alpha=8 * rank, targets=("q_proj", "down_proj"))
        for seed, (name, rank) in enumerate((("a", 4), ("b", 7), ("c", 20)))
    }


def asked(count: int, **more: object) -> list[tuple[object, list[int]]]:
    """Prompts and texts of all lengths, greedy ones and drawn ones, some with log-probabilities."""
    found = []
    for number in range(count):
        sampling = SamplingParams(seed=number, temperature=0.9 * (number % 3), top_k=20 * (number % 2))
        wanted = LogprobParams(top=2) if number % 4 == 0 else None
        one = request(f"{number}", max_tokens=3 + number % 9, sampling=sampling, logprobs=wanted, **more)  # type: ignore[arg-type]
        found.append((one, [40 + number] * (1 + 5 * number)))
    return found


def tokens(outcomes: dict[tuple[str, int], Outcome]) -> dict[tuple[str, int], tuple[object, ...]]:
    return {name: (each.token_ids, each.text) for name, each in outcomes.items()}


def test_texts_are_those_of_steps_without_graphs() -> None:
    recorded = Recorded()
    plain, own = endless(paged()), recording(paged(), recorded)
    expected, found = (complete(engine, asked(12)) for engine in (plain, own))  # type: ignore[arg-type]
    assert tokens(found) == tokens(expected)
    assert {4, 8} <= set(recorded.num_replayed) <= {1, 2, 4, 8}, "rows in between are padded"
    assert sum(recorded.num_replayed.values()) < own.num_steps, "steps with prompts are computed as ever"
    for name, each in found.items():
        for one, other in zip(each.logprobs, expected[name].logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)  # type: ignore[attr-defined]


def test_recording_writes_no_keys_and_rows_of_nobody_write_none() -> None:
    own = recording(paged(), Recorded())
    storage = own._store.storage
    pages = [*storage._keys, *storage._values]  # type: ignore[attr-defined]
    assert not any(bool(each.any()) for each in pages)
    engine_of = {"plain": endless(paged()), "graphs": own}
    for engine in engine_of.values():
        complete(engine, asked(3))  # type: ignore[arg-type]
    others = engine_of["plain"]._store.storage
    for one, other in zip(pages, [*others._keys, *others._values], strict=True):  # type: ignore[attr-defined]
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert not bool(one[-1].any()), "the page of zeros stays one"


@needs_kernels
def test_each_row_has_its_own_adapter(tmp_path: Path) -> None:
    folders = strong_adapters(tmp_path)
    recorded = Recorded()
    plain, own = (make_engine(paged(), folders, eos_token_ids=frozenset(), runner=GatheringRunner) for _ in range(2))
    own._runner.record_steps(recorded, num_places=8)
    prompts = [(request(f"{each}", max_tokens=6, adapter=each), [42] * 3) for each in (None, *folders)]
    expected = tokens(complete(plain, prompts))
    assert len({str(ids) for ids, _ in expected.values()}) == 4, "each adapter is strong enough to be told from others"
    assert tokens(complete(own, prompts)) == expected
    assert (4, (8, 32)) in graphs_of(own)._graphs
    assert recorded.num_replayed[4] >= 4


def test_a_preempted_sequence_goes_on_with_other_blocks() -> None:
    block = make_engine(paged())._store.bytes_per_block
    settings = paged(kv_cache_bytes=12 * block, max_model_len=160, prefix_cache=False)
    plain, own = endless(settings), recording(settings, Recorded())
    wanted = [(request(f"{number}", max_tokens=70), [40 + number] * 20) for number in range(4)]
    expected, found = (complete(engine, wanted) for engine in (plain, own))
    assert own.num_preemptions > 0
    assert tokens(found) == tokens(expected)


@needs_kernels
def test_nothing_is_recorded_within_requests(tmp_path: Path) -> None:
    folders = strong_adapters(tmp_path)
    own = make_engine(paged(), folders, runner=GatheringRunner)
    own._runner.record_steps(Recorded(), num_places=8)
    graphs = graphs_of(own)
    before = graphs.num_captured
    assert before == 2 * len(sizes_up_to(8)), "each size without adapters, and with them"
    complete(own, [(request(f"{each}", max_tokens=80, adapter=each), [42] * 30) for each in ("a", None)])
    complete(own, [(request(f"{each}", max_tokens=4, adapter=each), [42] * 3) for each in (None, *folders)])
    assert graphs.num_captured == before


def test_graphs_share_their_logits() -> None:
    recorded = Recorded()
    recording(paged(), recorded)
    assert len({each.untyped_storage().data_ptr() for each in recorded.results}) == 1
    assert len(recorded.results) == len(sizes_up_to(8))


def test_where_one_recording_fails_the_others_are_replayed(caplog: pytest.LogCaptureFixture) -> None:
    recorded = Recorded(fails_at=2)
    plain, own = endless(paged()), recording(paged(), recorded)
    expected, found = (complete(engine, asked(12)) for engine in (plain, own))  # type: ignore[arg-type]
    assert tokens(found) == tokens(expected)
    assert 8 in recorded.num_replayed
    assert 4 not in recorded.num_replayed
    assert recorded.num_captured == len(sizes_up_to(8)), "what failed is not tried at every step"
    assert caplog.text.count("steps of 4 rows are launched kernel by kernel, as recording failed: the driver") == 1


def test_what_a_graph_computes_is_compared_before_anything_is_computed_by_it(caplog: pytest.LogCaptureFixture) -> None:
    recorded = Recorded(errs=3.0)
    plain, own = endless(paged()), recording(paged(), recorded)
    expected, found = (complete(engine, asked(5)) for engine in (plain, own))  # type: ignore[arg-type]
    assert tokens(found) == tokens(expected)
    assert not recorded.num_replayed
    assert caplog.text.count("what was recorded differs from what is computed, by up to 3") == len(sizes_up_to(8))


def test_steps_that_are_more_than_a_token_of_each_are_not_of_graphs() -> None:
    recorded = Recorded()
    engine = recording(paged(), recorded)
    engine.add(sequences(engine, request("prompt", max_tokens=1), [40] * 30))
    engine.step()
    assert not recorded.num_replayed


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256])
def test_sizes_are_enough_and_none_is_twice_what_is_needed(most: int) -> None:
    sizes = sizes_up_to(most)
    assert sizes[-1] >= most
    assert sizes == sorted(set(sizes))
    assert all(size >= most for size in sizes[-1:])
    for rows in range(1, most + 1):
        assert next(size for size in sizes if size >= rows) < 2 * rows or rows == 1


def test_rows_of_adapters_lie_where_kernels_look_for_them() -> None:
    residents = {
        0: Resident(version="a", rank=8, place=1, has_gain=False),
        1: Resident(version="b", rank=16, place=0, has_gain=False),
        2: Resident(version="c", rank=8, place=0, has_gain=False),
    }
    mixes: list[Mix] = [((0, 1.0),), (), ((1, 0.5),), ((2, -2.0),), ((0, 1.0),)]
    rows = DecodeRows(8, ranks=(8, 16), device=CPU)
    layout = Layout(
        token_ids=[3] * 5, positions=[9] * 5, places=[4] * 5, logit_rows=list(range(5)), mixes=tuple(mixes),
        readings=tuple(Reading(first_token=at, place=at, blocks=[0], start=9, length=1) for at in range(5)),
    )  # fmt: skip
    rows.fill(layout, lay_rows(mixes, residents, tile_rows=16) or ())
    laid = lay_tiles(mixes, residents, tile_rows=16, device=CPU) or ()
    for own, expected in zip(rows.shelf_tiles(), laid, strict=True):
        count, num_tiles = len(expected.rows), expected.tiles.shape[1]
        assert own.rank == expected.rank
        assert torch.equal(own.rows[:count], expected.rows)
        assert torch.equal(own.factors[:count], expected.factors)
        assert torch.equal(own.tiles[:, :num_tiles], expected.tiles)
        assert not own.tiles[2, num_tiles:].any(), "the other tiles have no rows"
    assert rows.places.tolist() == [4] * 5 + [-1] * 3
    assert rows.tiles(torch.zeros(9, 2)).singles[3].tolist() == [1] * 5 + [0] * 3
    rows.fill(replace(layout, mixes=((),) * 5), ())
    assert not any(each.tiles.any() for each in rows.shelf_tiles())


def test_tables_are_sent_what_they_have_gained() -> None:
    tables = BlockTables(num_places=3, max_blocks=8, block_size=4, padding=99, device=CPU)

    def reading(place: int, blocks: list[int]) -> Reading:
        return Reading(first_token=0, place=place, blocks=blocks, start=0, length=1)

    first, second = [5, 6], [7]
    tables.catch_up([reading(2, first), reading(0, second)])
    first.append(8)
    tables.tensor[2, 0] = 77  # seen to be left alone
    tables.catch_up([reading(2, first)])
    assert tables.tensor[2, :4].tolist() == [77, 6, 8, 99]
    tables.catch_up([reading(2, [1])])
    assert tables.tensor[2, 0] == 1
    assert tables.tensor[0, :2].tolist() == [7, 99]
