"""A step's layers in one call give every bit that they give one after the other, and only steps that they are for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_app.engine.cpu.products import LaidOut
from serve_app.engine.cpu.rows_plan import RowsPlan
from serve_app.engine.cpu.sequence import CallSequence, carrier
from serve_app.engine.cpu.token_kernels import ADD_AND_NORM, GATE, NORM
from serve_app.engine.cpu.tokens import token_kernels
from serve_app.engine.decoder import program as of
from serve_app.engine.decoder.openmp import libgomp
from serve_app.engine.decoder.program import MOST_ROWS, Program, Shortcut
from serve_app.engine.decoder.step import Step
from serve_app.engine.engine import Engine
from tests.engine.adapter_files import save_adapter
from tests.engine.harness import Outcome, complete, config, make_engine, request
from tests.families.making import save_model
from tests.families.test_parity import whole_model

SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32,
    "max_position_embeddings": 1024,
}  # fmt: skip
HAS_KERNELS = LaidOut.may_read(torch.Size([64, 64]), torch.bfloat16)
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="a CPU without AVX512-BF16, or with AMX")
needs_libgomp = pytest.mark.skipif(libgomp() is None, reason="needs torch's libgomp")


def saved(folder: Path, family: str = "llama", **settings: object) -> Path:
    save_model(family, SIZES | settings, folder)
    return folder


def made(folder: Path, **changes: object) -> Engine:
    settings = {"dtype": "bfloat16", "max_num_sequences": 80, "max_batch_tokens": 256} | changes
    return make_engine(config(folder, **settings), eos_token_ids=frozenset())


def shortcut_of(engine: Engine) -> Shortcut:
    loop = engine._runner._loop
    assert loop is not None
    return loop._shortcut


def answers(engine: Engine, lengths: Sequence[int], max_tokens: int = 12) -> dict[tuple[str, int], Outcome]:
    """Of prompts that differ, after each of which a text of its own length follows."""
    asked = [
        (
            request(f"r{number}", max_tokens=max_tokens + number % 5),
            [(7 * number + 3 * at) % 251 for at in range(length)],
        )
        for number, length in enumerate(lengths)
    ]
    return complete(engine, asked)


def ids(outcomes: dict[tuple[str, int], Outcome]) -> dict[tuple[str, int], list[int]]:
    return {name: outcome.token_ids for name, outcome in outcomes.items()}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step had that was computed in one call."""
    found: list[int] = []
    run = Program.run

    def noted(self: Program, x: torch.Tensor, *rest: object) -> torch.Tensor:
        found.append(len(x))
        return run(self, x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Program, "run", noted)
    return found


@needs_kernels
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 24}),
        ("llama", {"num_key_value_heads": 4, "num_hidden_layers": 1}),
    ],
)
def test_texts_are_the_same_to_the_last_bit(
    family: str, settings: dict[str, object], weights: str | None, tmp_path: Path, runs: list[int]
) -> None:
    folder, lengths = saved(tmp_path, family, **settings), [3, 40, 7, 120, 1, 64, 9]
    engine = made(folder, weights=weights, max_batch_tokens=100)
    got = ids(answers(engine, lengths))
    assert len(set(runs)) > 3, "of many numbers of rows"
    assert shortcut_of(engine)._tried == {(True, False), (False, False)}
    del runs[:]
    plain = made(folder, weights=weights, max_batch_tokens=100)
    shortcut_of(plain)._program = None
    assert ids(answers(plain, lengths)) == got
    assert not runs


@needs_kernels
@pytest.mark.parametrize("residual", [1.0, 0.5])
def test_the_streams_are_equal_and_so_is_what_is_written(
    residual: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    """In steps of 64 sequences, some of whose rows see more keys than an item has."""
    streams: list[tuple[torch.Tensor, torch.Tensor]] = []
    stream = Shortcut.stream

    def compared(self: Shortcut, step: Step, x: torch.Tensor, rotations: Any, **ways: Any) -> torch.Tensor:
        self._tried = {(False, False), (True, False)}
        expected = ways["by_layers"](x.clone())
        assert isinstance(step.attention, RowsPlan)
        kept = [each for layer in range(2) for each in step.attention._storage.all_positions(layer)]
        written = [each[step.places].clone() for each in kept]
        for each in kept:
            each[step.places] = torch.nan
        found = stream(self, step, x, rotations, **ways)
        for each, before in zip(kept, written, strict=True):
            assert torch.equal(each[step.places], before)
        streams.append((expected, found.clone()))
        return found

    engine = made(saved(tmp_path), max_batch_tokens=150)
    monkeypatch.setattr(Shortcut, "stream", compared)
    loop = engine._runner._loop
    assert loop is not None
    loop._layers = [replace(layer, residual=residual) for layer in loop._layers]
    loop._shortcut = Shortcut(loop._layers)
    answers(engine, [700, 530, *[1] * 62], max_tokens=20)
    assert max(len(found) for _, found in streams) > 60
    assert max(runs) > 2 * 64, "with prompts"
    assert len(runs) > len(streams) / 2
    for expected, found in streams:
        assert torch.equal(expected, found)


@needs_kernels
def test_more_tokens_than_it_is_for_are_the_loops(tmp_path: Path, runs: list[int]) -> None:
    engine = made(saved(tmp_path))
    answers(engine, [MOST_ROWS + 1], max_tokens=9)
    assert set(runs) == {1}
    answers(engine, [MOST_ROWS, 5], max_tokens=9)
    assert max(runs) <= MOST_ROWS


@needs_kernels
@pytest.mark.parametrize("is_small", [True, False])
def test_small_calls_are_one_threads_where_the_others_are_asleep(
    is_small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ways = saved(tmp_path), []
    expected = ids(answers(made(folder), [3, 40, 5]))
    carry_out = CallSequence.__call__

    def noted(self: CallSequence, count: int, *, is_alone: bool = False) -> None:
        ways.append(is_alone)
        carry_out(self, count, is_alone=is_alone)

    monkeypatch.setattr(CallSequence, "__call__", noted)
    engine, before = made(folder), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert ids(answers(engine, [3, 40, 5])) == expected
        assert set(ways) == {False}, "nobody is asleep"
        del ways[:]
        monkeypatch.setattr(of, "are_asleep", lambda: True)
        monkeypatch.setattr(of, "ALONE", of.ALONE if is_small else 1)
        assert ids(answers(engine, [3, 40, 5])) == expected
    finally:
        torch.set_num_threads(before)
    assert set(ways) == {is_small}


def adapted(folder: Path, adapters: dict[str, Path], **changes: object) -> Engine:
    settings = config(folder, dtype="bfloat16", max_num_sequences=16, max_batch_tokens=256, max_adapters=3, **changes)
    return make_engine(settings, adapters, eos_token_ids=frozenset())


MIXED: list[dict[str, Any]] = [
    {"adapter": "a"}, {"adapter": "b"}, {}, {"mix": {"a": 0.5, "c": 0.7}}, {"adapter": "c"}, {}, {"adapter": "a"},
    {"mix": {"b": 0.2, "c": 1.0}},
]  # fmt: skip


def mixed_answers(engine: Engine) -> dict[tuple[str, int], list[int]]:
    asked = [(request(f"r{at}", max_tokens=9 + at % 3, **which), [at + 1, 2, 3]) for at, which in enumerate(MIXED)]
    return ids(complete(engine, asked))


@needs_kernels
@pytest.mark.parametrize("weights", [None, "int8"])
def test_rows_with_adapters_are_the_same_to_the_last_bit(weights: str | None, tmp_path: Path, runs: list[int]) -> None:
    """Of several ranks, several of a row, some for a part of the linears, and rows without; then without any."""
    folder = saved(tmp_path / "model")
    whole = whole_model(folder)
    wanted = {"a": (8, ("",)), "b": (16, ("q_proj", "down_proj")), "c": (4, ("layers.1.mlp.up_proj", "o_proj"))}
    adapters = {
        name: save_adapter(tmp_path / name, whole, rank=rank, seed=rank, targets=targets)
        for name, (rank, targets) in wanted.items()
    }
    engine = adapted(folder, adapters, weights=weights)
    got = mixed_answers(engine)
    assert max(runs) == 3 * len(MIXED), "all prompts at once"
    plain = adapted(folder, adapters, weights=weights)
    shortcut_of(plain)._program = None
    assert mixed_answers(plain) == got
    assert ids(answers(engine, [3, 4])) == ids(answers(plain, [3, 4]))
    assert len(shortcut_of(engine)._tried) == 4, "with prompts and without, with adapters and without"


@needs_kernels
def test_adapters_that_come_and_go_are_laid_out_anew(tmp_path: Path, runs: list[int]) -> None:
    """More of them than slots, of one rank, so that each has had another's place."""
    folder = saved(tmp_path / "model")
    whole = whole_model(folder)
    adapters = {str(seed): save_adapter(tmp_path / str(seed), whole, rank=8, seed=seed) for seed in range(5)}
    asked = [(request(f"{turn}-{name}", adapter=name), [5, 6, 7]) for turn in range(2) for name in adapters]
    found = {}
    for is_whole in (True, False):
        engine = adapted(folder, adapters)
        if not is_whole:
            shortcut_of(engine)._program = None
        found[is_whole] = [ids(complete(engine, [each])) for each in asked]
    assert runs
    assert found[True] == found[False]
    assert len({tuple(*each.values()) for each in found[True]}) == len(adapters)


@needs_kernels
def test_rows_with_gains_are_the_loops(tmp_path: Path, runs: list[int]) -> None:
    folder = saved(tmp_path / "model")
    path = save_adapter(tmp_path / "dora", whole_model(folder), rank=8, use_dora=True)
    complete(adapted(folder, {"a": path}), [(request("x", adapter="a"), [1, 2, 3])])
    assert not runs


@needs_kernels
@pytest.mark.parametrize(
    ("family", "settings"), [("olmo2", {}), ("gemma2", {}), ("olmo", {}), ("llama", {"hidden_act": "gelu"})]
)
def test_layers_with_anything_else_have_none(family: str, settings: dict[str, object], tmp_path: Path) -> None:
    engine = made(saved(tmp_path, family, **settings))
    assert shortcut_of(engine)._program is None
    assert len(answers(engine, [3, 4])) == 2


@needs_kernels
def test_other_types_of_numbers_have_none(tmp_path: Path) -> None:
    assert shortcut_of(made(saved(tmp_path), dtype="float32"))._program is None


@needs_kernels
def test_one_that_gives_something_else_is_not_used_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path)
    expected = ids(answers(made(folder), [3, 5]))
    run = Program.run
    monkeypatch.setattr(Program, "run", lambda self, *step: run(self, *step) + 1)
    engine = made(folder)
    with caplog.at_level(logging.WARNING, of.__name__):
        assert ids(answers(engine, [3, 5])) == expected
    assert "give something else" in caplog.text
    assert shortcut_of(engine)._program is None


@needs_kernels
def test_it_is_laid_out_anew_for_another_number_of_threads(tmp_path: Path, runs: list[int]) -> None:
    engine, before = made(saved(tmp_path)), torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            found.append([outcome.token_ids for outcome in answers(engine, [3, 5]).values()])
    finally:
        torch.set_num_threads(before)
    assert runs
    assert found[0] == found[1] == found[2]
    program = shortcut_of(engine)._program
    assert program is not None
    assert {form.num_threads for form in program._made} == {1, 2, 4}


@needs_libgomp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_in_a_row_do_what_they_do_one_by_one(dtype: torch.dtype) -> None:
    tokens, runs = token_kernels(dtype), carrier()
    assert tokens is not None
    assert runs is not None
    draw = torch.Generator().manual_seed(0)
    stream, change = (torch.randn(7, 64, generator=draw).to(dtype) for _ in range(2))
    weight, expected_stream = torch.ones(64), stream.clone()
    normed, gated = torch.empty_like(stream), torch.empty(7, 32, dtype=dtype)
    norm = {"stream": stream.data_ptr(), "output": normed.data_ptr(), "weight": weight.data_ptr(), "size": 64}
    calls = CallSequence(
        runs,
        [
            tokens.call(NORM, **norm),
            tokens.call(GATE, inputs=normed.data_ptr(), output=gated.data_ptr(), size=32),
            tokens.call(ADD_AND_NORM, **norm, change=change.data_ptr(), factor=0x3F800000),
        ],
    )
    for count in (7, 3):
        calls.put(torch.arange(3), num_tokens=count)
        calls(len(calls))
        expected_gate = tokens.gate(tokens.norm(expected_stream[:count], weight, 0.0))
        tokens.add_and_norm(expected_stream[:count], change[:count], 1.0, weight, 0.0)
        assert torch.equal(gated[:count], expected_gate)
        assert torch.equal(stream, expected_stream)


@needs_libgomp
def test_a_parameter_is_put_into_the_calls_that_are_named_alone() -> None:
    tokens, runs = token_kernels(torch.float32), carrier()
    assert tokens is not None
    assert runs is not None
    inputs = torch.randn(4, 5, 32)
    outputs = torch.zeros(4, 5, 16)
    calls = CallSequence(runs, [tokens.call(GATE, inputs=each.data_ptr(), size=16, num_tokens=5) for each in inputs])
    calls.put(torch.tensor([0, 2]), output=torch.tensor([outputs[0].data_ptr(), outputs[1].data_ptr()]))
    calls.put(torch.tensor([1, 3]), output=torch.tensor([outputs[2].data_ptr(), outputs[3].data_ptr()]))
    calls(len(calls))
    for of_input, output in zip((0, 2, 1, 3), outputs, strict=True):
        assert torch.equal(output, tokens.gate(inputs[of_input]))
