"""Our own attention on CPUs gives what torch gives, to a row alone what in company, and knows what it cannot do."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.engine.kv.pages import PageStorage
from serve_app.engine.kv.rows import SHORT
from serve_app.engine.kv.storage import GroupedPlan, Holding, KeyValueShape, LayerShape, Reading
from serve_app.kernels.cpu import rows as kernels
from serve_app.kernels.cpu import tiles
from serve_app.kernels.cpu.attention import STRETCH, Form
from serve_app.kernels.cpu.compiling import KINDS, Kernel, Machine
from serve_app.kernels.cpu.rows import Row, RowsKernel, Table, rows_kernel
from serve_app.kernels.cpu.tiles import TilesKernel
from serve_app.kernels.forms import Scoring, Stretch
from serve_app.kernels.openmp import libgomp
from tests.engine.conftest import DEMO
from tests.engine.harness import complete, config, make_engine, request

pytestmark = pytest.mark.skipif(libgomp() is None, reason="needs torch's libgomp")

KV_HEADS, DIM, LONGEST, BLOCK = 2, 32, 2048, 16
LENGTHS = (1, 63, 64, 65, 700, 2 * STRETCH, 2 * STRETCH + 1)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def kernel(group: int, dim: int, dtype: torch.dtype) -> RowsKernel:
    found = rows_kernel(group, dim, dtype)
    assert found is not None
    return found


def scattered(count: int, *, seed: int = 4) -> Tensor:
    """So many slots in an order that is drawn."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(query: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> Tensor:
    """One query, [heads, dim], over keys and values [keys, kv_heads, dim], in float32."""
    parts = (query[:, None].float(), keys.float().transpose(0, 1), values.float().transpose(0, 1))
    return F.scaled_dot_product_attention(*parts, scale=scale, enable_gqa=True)[:, 0]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("group", "dim"), [(1, 16), (3, 80), (7, 64), (4, 256), (16, 128), (71, 64)])
def test_rows_of_any_length_and_form_get_what_torch_gives(group: int, dim: int, dtype: torch.dtype) -> None:
    query = drawn(len(LENGTHS), KV_HEADS * group, dim, dtype=dtype, seed=1) * 2
    keys, values = drawn(2, 3000, KV_HEADS, dim, dtype=dtype, seed=2)
    rows = [Row(token=at, position=3000 - length, num_keys=length) for at, length in enumerate(LENGTHS)]
    output, slots = torch.full_like(query, torch.nan), scattered(3000)
    kernel(group, dim, dtype).run(query, keys, values, slots, Table(rows), output, scale=0.3 / dim**0.5)
    for row in rows:
        seen = slots[row.position : row.position + row.num_keys]
        expected = exact(query[row.token], keys[seen], values[seen], scale=0.3 / dim**0.5)
        torch.testing.assert_close(output[row.token].float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e4])
def test_weights_may_be_flat_or_all_on_one_key(size: float, dtype: torch.dtype) -> None:
    query, (keys, values) = drawn(1, 4, DIM, dtype=dtype) * size, drawn(2, 600, KV_HEADS, DIM, dtype=dtype, seed=3)
    output, limit = torch.empty_like(query), 5 * TOLERANCES[dtype]
    table = Table([Row(token=0, position=0, num_keys=600)])
    kernel(2, DIM, dtype).run(query, keys, values, torch.arange(600), table, output, scale=1.0)
    torch.testing.assert_close(output[0].float(), exact(query[0], keys, values, scale=1.0), atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_mean_of_equal_values_is_each_of_them(dtype: torch.dtype) -> None:
    query, keys = drawn(3, 4, DIM, dtype=dtype), drawn(700, KV_HEADS, DIM, dtype=dtype, seed=1)
    values, output = torch.full_like(keys, 0.7109375), torch.empty_like(query)
    rows = [Row(token=at, position=0, num_keys=length) for at, length in enumerate((5, 64, 700))]
    kernel(2, DIM, dtype).run(query, keys, values, torch.arange(700), Table(rows), output, scale=1.0)
    torch.testing.assert_close(output, torch.full_like(output, 0.7109375), atol=0, rtol=1e-6)


def test_a_row_gets_the_same_bits_alone_in_company_and_of_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, (keys, values) = drawn(9, 14, 64, dtype=torch.bfloat16), drawn(2, 9000, KV_HEADS, 64, dtype=torch.bfloat16)
    rows = [Row(token=at, position=at * 900, num_keys=100 + 97 * at) for at in range(9)]
    together, slots = torch.empty_like(query), scattered(9000)
    attend = kernel(7, 64, torch.bfloat16)
    attend.run(query, keys, values, slots, Table(rows), together, scale=0.125)
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        alone = torch.empty_like(query)
        for row in rows:
            attend.run(query, keys, values, slots, Table([row]), alone, scale=0.125)
        assert torch.equal(alone, together)
    torch.set_num_threads(threads)
    monkeypatch.setattr(kernels, "SHORT", 1 << 40)  # without a team
    attend.run(query, keys, values, slots, Table(rows), alone.zero_(), scale=0.125)
    assert torch.equal(alone, together)


def test_many_long_rows_are_attended_to_in_calls_that_leave_little(monkeypatch: pytest.MonkeyPatch) -> None:
    query, (keys, values) = drawn(9, 4, DIM), drawn(2, 3000, KV_HEADS, DIM, seed=3)
    lengths = (100, 3000, 2900, 5, 600, 513, 3000, 1, 2)
    stretches = [Stretch(token=at, position=0, bounds=[(3000 - length, 3000)]) for at, length in enumerate(lengths)]
    found, slots = [], scattered(3000)
    for most, expected in ((kernels.ITEMS, [9]), (7, [2, 2, 2, 2, 1]), (1, [1] * 9)):
        monkeypatch.setattr(kernels, "ITEMS", most)
        tables = RowsKernel.lay(stretches)
        assert [table.num_rows for table in tables] == expected
        found.append(torch.full_like(query, torch.nan))
        for table in tables:
            kernel(2, DIM, torch.float32).run(query, keys, values, slots, table, found[-1], scale=0.2)
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


def test_engines_of_one_process_do_not_share_a_calls_state() -> None:
    query, (keys, values) = drawn(32, 4, DIM), drawn(2, 32 * LONGEST, KV_HEADS, DIM)
    attend, slots = kernel(2, DIM, torch.float32), torch.arange(32 * LONGEST)

    def attended(lengths: Sequence[int]) -> Tensor:
        rows = [Row(token=at, position=at * LONGEST, num_keys=length) for at, length in enumerate(lengths)]
        output = torch.full_like(query, torch.nan)
        attend.run(query, keys, values, slots, Table(rows), output, scale=0.2)
        return output

    asked = [range(1, 65, 2), range(600, 1880, 40)]
    expected = [attended(lengths) for lengths in asked]
    with ThreadPoolExecutor(4) as threads:
        for number, output in enumerate(threads.map(attended, asked * 200)):
            assert torch.equal(output, expected[number % 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype) -> None:
    query, (keys, values) = drawn(4, 4, DIM, dtype=dtype), drawn(2, 4 * LONGEST, KV_HEADS, DIM, dtype=dtype)
    keys[LONGEST + 5], values[2 * LONGEST + 600, 1], query[3] = torch.nan, torch.inf, 1e38
    rows = [Row(token=at, position=at * LONGEST, num_keys=700) for at in range(4)]
    output, slots = torch.zeros_like(query), torch.arange(4 * LONGEST)
    kernel(2, DIM, dtype).run(query, keys, values, slots, Table(rows), output, scale=1.0)
    limit, expected = TOLERANCES[dtype], exact(query[0], keys[:700], values[:700], scale=1.0)
    torch.testing.assert_close(output[0].float(), expected, atol=limit, rtol=limit)
    assert output[1].isnan().all()
    assert output[2, :2].isfinite().all()
    assert not output[2, 2:].isfinite().all()


def storage(dtype: torch.dtype = torch.float32) -> PageStorage:
    """Layers of two sizes, full of numbers: what comes behind a row's keys is not zeros."""
    layers = tuple(LayerShape(heads=KV_HEADS, key_dim=dim, value_dim=dim) for dim in (DIM, 2 * DIM, DIM))
    made = PageStorage(
        KeyValueShape(layers=layers), num_blocks=600, block_size=BLOCK, dtype=dtype, device=torch.device("cpu")
    )
    for seed, pool in enumerate(made._pools.values()):
        pool.copy_(drawn(*pool.shape, seed=seed))
    return made


def readings(*lengths: tuple[int, int]) -> list[Reading]:
    """In turn: where each starts, and of how many tokens it is. Their blocks lie apart."""
    found, token, blocks = [], 0, scattered(600).tolist()
    for place, (start, length) in enumerate(lengths):
        own = [blocks.pop() for _ in range(0, start + length, BLOCK)]
        found.append(Reading(first_token=token, place=place, blocks=own, start=start, length=length))
        token += length
    return found


def written_at(made: PageStorage, asked: Sequence[Reading]) -> Tensor:
    spans = [(Holding(each.place, blocks=[*each.blocks]), each.start, each.num_keys) for each in asked]
    return torch.tensor([place for span in spans for place in made.places(*span)])


@pytest.mark.parametrize(
    "asked",
    [
        [(0, 1), (700, 1), (1999, 1)],
        [(699, 1), (40, SHORT), (130, 2)],
        [(699, 1), (40, SHORT + 1), (0, 300), (1000, 3)],
        [(699, 1), (600, SHORT + 1), (0, 300), (1000, 30)],
        [(0, 40)],
    ],
)
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (48, None), (None, 64), (600, 128)])
@pytest.mark.parametrize(("is_reader", "heads", "dtype"), [
    (False, 4, torch.float32), (True, 4, torch.float32), (False, 10, torch.bfloat16), (False, 26, torch.bfloat16),
])  # fmt: skip
def test_a_step_is_attended_to_and_written_as_torch_would(
    asked: Sequence[tuple[int, int]],
    window: int | None,
    chunk: int | None,
    is_reader: bool,
    heads: int,
    dtype: torch.dtype,
) -> None:
    steps = readings(*asked)
    tokens, together = sum(each.length for each in steps), heads + 2 * KV_HEADS
    # views of one product, as a layer gives them
    joined = drawn(tokens, together * DIM, dtype=dtype, seed=9).view(tokens, together, DIM)
    query, key, value = joined.split((heads, KV_HEADS, KV_HEADS), dim=1)
    scoring = Scoring(scale=DIM**-0.5, window=window, chunk=chunk)
    results, written = [], []
    for has_kernel in (True, False):
        pages = storage(dtype)
        places = written_at(pages, steps)
        plan = pages.plan(steps, places) if has_kernel else GroupedPlan(pages, pages.groups(steps), places)
        new = (None, None) if is_reader else (key, value)
        results.append(plan.run(2, query, *new, scoring=scoring))
        written.append(pages._pools[KV_HEADS, DIM])
    torch.testing.assert_close(*results, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert torch.equal(*written)


def test_layers_of_one_step_may_share_their_key_heads_among_other_numbers_of_queries() -> None:
    layers = tuple(LayerShape(heads=heads, key_dim=DIM, value_dim=DIM) for heads in (4, 1))
    made = PageStorage(
        KeyValueShape(layers=layers), num_blocks=600, block_size=BLOCK, dtype=torch.float32, device=torch.device("cpu")
    )
    for seed, pool in enumerate(made._pools.values()):
        pool.copy_(drawn(*pool.shape, seed=seed))
    asked = readings((0, 100), (30, 1))
    places, query = written_at(made, asked), drawn(101, 16, DIM, seed=5)
    plan, expected = made.plan(asked, places), GroupedPlan(made, made.groups(asked), places)
    for layer in range(2):
        given = layer, query, None, None
        found = plan.run(*given, scoring=Scoring(scale=DIM**-0.5))
        torch.testing.assert_close(found, expected.run(*given, scoring=Scoring(scale=DIM**-0.5)), atol=2e-5, rtol=2e-5)


def test_they_are_made_while_a_model_is_loaded_and_not_when_a_sequence_waits() -> None:
    engine, caches = make_engine(config(DEMO)), (rows_kernel, tiles.tiles_kernel)
    before = [each.cache_info().misses for each in caches]
    assert all(before)
    complete(engine, [(request("one"), [42] * 30)])
    assert [each.cache_info().misses for each in caches] == before


def test_what_the_kernel_does_not_know_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(RowsKernel, "run", fail)
    pages, asked = storage(), readings((30, 1))
    query = drawn(1, 4, DIM)
    key = value = drawn(1, KV_HEADS, DIM)
    plan = pages.plan(asked, written_at(pages, asked))
    with pytest.raises(AssertionError):
        plan.run(0, query, key, value, scoring=Scoring(scale=1.0))
    for scoring in (Scoring(scale=1.0, softcap=20.0), Scoring(scale=1.0, sinks=torch.zeros(4))):
        assert plan.run(0, query, key, value, scoring=scoring).isfinite().all()


@pytest.mark.parametrize("width", [8, 16])
def test_what_is_written_out_for_an_item_stays_small(width: int) -> None:
    for group, dim in ((1, 64), (7, 64), (8, 128), (16, 128), (71, 64), (12, 256)):
        form = Form(group=group, dim=dim, kind="bfloat16", width=width, registers=32)
        assert form.heads * form.parts == group
        assert form.heads == 1 or form.heads * form.vectors <= 64


def prompts_kernel(group: int, dim: int, dtype: torch.dtype, machine: Machine | None = None) -> TilesKernel:
    machine = machine or Machine.here()
    form = tiles.TileForm(group=group, dim=dim, kind=KINDS[dtype], width=machine.width, registers=machine.registers)
    return TilesKernel(form)


def causal(start: int, length: int) -> list[tuple[int, int]]:
    return [(0, start + number + 1) for number in range(length)]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("machine", [Machine(width=16, registers=32), Machine(width=8, registers=16)], ids=str)
@pytest.mark.parametrize(("group", "dim"), [(1, 16), (3, 80), (7, 64), (4, 256), (16, 128)])
def test_prompts_of_any_length_and_form_get_what_torch_gives(
    group: int, dim: int, dtype: torch.dtype, machine: Machine
) -> None:
    spans = {0: (0, 1), 1: (300, 9), 10: (63, 64), 74: (0, 130)}  # by token: where it starts, and how long it is
    query = drawn(204, KV_HEADS * group, dim, dtype=dtype, seed=1) * 2
    keys, values = drawn(2, 800, KV_HEADS, dim, dtype=dtype, seed=2)
    slots, output, scale = scattered(800), torch.full_like(query, torch.nan), 0.3 / dim**0.5
    stretches = [Stretch(token=token, position=7 * token, bounds=causal(*span)) for token, span in spans.items()]
    made = prompts_kernel(group, dim, dtype, machine)
    made.run(query, keys, values, slots, *made.lay(stretches), output, scale=scale)
    for each in stretches:
        for number, (begin, end) in enumerate(each.bounds):
            seen, token = slots[each.position + begin : each.position + end], each.token + number
            expected, limit = exact(query[token], keys[seen], values[seen], scale=scale), TOLERANCES[dtype]
            torch.testing.assert_close(output[token].float(), expected, atol=limit, rtol=limit)


def test_a_prompt_gets_the_same_bits_in_any_chunks_in_company_and_of_any_number_of_threads() -> None:
    query, (keys, values) = drawn(150, 14, 64, dtype=torch.bfloat16), drawn(2, 900, 2, 64, dtype=torch.bfloat16)
    made, slots = prompts_kernel(7, 64, torch.bfloat16), scattered(900)
    whole = [
        Stretch(token=0, position=0, bounds=causal(50, 100)),
        Stretch(token=100, position=400, bounds=causal(9, 50)),
    ]
    together, alone = torch.zeros_like(query), torch.zeros_like(query)
    made.run(query, keys, values, slots, *made.lay(whole), together, scale=0.125)
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        alone.zero_()
        for first, last in ((0, 13), (13, 14), (14, 100)):
            part = Stretch(token=first, position=0, bounds=whole[0].bounds[first:last])
            made.run(query, keys, values, slots, *made.lay([part]), alone, scale=0.125)
        made.run(query, keys, values, slots, *made.lay(whole[1:]), alone, scale=0.125)
        assert torch.equal(alone, together)
    torch.set_num_threads(threads)


def test_with_amx_prompts_are_torchs_where_it_is_much_faster_and_elsewhere_where_the_kernel_is_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, seconds = tiles.tiles_kernel.__wrapped__, iter(([1.0, 1.2], [1.0, 1.4]))  # torch's and ours
    monkeypatch.setattr(tiles, "seconds", lambda *_: next(seconds))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": True})
    assert make(2, DIM, torch.float32) is not None
    assert make(2, DIM, torch.float32) is None
    monkeypatch.setattr(TilesKernel, "run", lambda *_, **__: None)
    assert make(2, DIM, torch.float32) is None
    assert "is wrong" in caplog.text


def test_what_is_measured_takes_turns() -> None:
    trial, tries = kernels.Trial.drawn(2, DIM, torch.float32, tiles.TRIED), list[str]()
    ours = trial.computed_by(prompts_kernel(2, DIM, torch.float32))
    found = tiles.seconds(
        lambda: (tries.append("torch"), trial.by_torch())[1], lambda: (tries.append("ours"), ours())[1]
    )
    assert tries == ["torch", "ours"] * tiles.TRIES
    assert min(found) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_stays_in_its_query_or_its_sequence(dtype: torch.dtype) -> None:
    query, (keys, values) = drawn(60, 4, DIM, dtype=dtype), drawn(2, 400, KV_HEADS, DIM, dtype=dtype)
    query[5], keys[30], values[200] = torch.nan, torch.nan, torch.inf  # those keys are the first and second sequence's
    bounds = {0: causal(0, 20), 20: causal(80, 20), 40: causal(80, 20)}
    stretches = [Stretch(token=token, position=5 * token, bounds=each) for token, each in bounds.items()]
    made, output, scale = prompts_kernel(2, DIM, dtype), torch.zeros_like(query), DIM**-0.5
    made.run(query, keys, values, torch.arange(400), *made.lay(stretches), output, scale=scale)
    assert output[5].isnan().all()
    assert output[:20].isfinite().all(dim=(1, 2)).sum() == 19, "key 30 comes behind all that it sees"
    assert output[20:40].isfinite().all()
    assert not output[40:].isfinite().any(dim=(1, 2)).any()


def test_a_query_behind_a_window_sees_nothing_of_what_is_before_it() -> None:
    """Also where a whole block of keys is hidden from it and not from the first query of its tile."""
    query, (keys, values) = drawn(30, 4, DIM), drawn(2, 200, KV_HEADS, DIM)
    values[:64], keys[:64] = 1e30, 100.0
    bounds = [(60 + number, 100 + number) for number in range(30)]
    made, output = prompts_kernel(2, DIM, torch.float32), torch.zeros_like(query)
    [tiles_of_it] = made.lay([Stretch(token=0, position=0, bounds=bounds)])
    made.run(query, keys, values, torch.arange(200), tiles_of_it, output, scale=0.1)
    for number, (begin, end) in enumerate(bounds[4:], start=4):
        expected = exact(query[number], keys[begin:end], values[begin:end], scale=0.1)
        torch.testing.assert_close(output[number], expected, atol=2e-5, rtol=2e-5)


def test_sizes_that_are_not_whole_vectors_and_other_types_have_no_kernel() -> None:
    for make in (rows_kernel, tiles.tiles_kernel):
        assert make(2, 24 + 4, torch.float32) is None
        assert make(2, DIM, torch.float64) is None
    assert tiles.tiles_kernel(71, DIM, torch.float32) is None, "more heads than a tile has places"


def test_a_kernel_that_cannot_be_made_or_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = rows_kernel.__wrapped__
    monkeypatch.setattr(RowsKernel, "run", lambda *_, **__: None)
    assert make(2, DIM, torch.float32) is None
    assert "is wrong" in caplog.text

    def refuse(*_: object) -> None:
        raise RuntimeError("no LLVM")

    monkeypatch.setattr(Kernel, "__init__", refuse)
    assert make(2, DIM, torch.float32) is None
    assert "no LLVM" in caplog.text
