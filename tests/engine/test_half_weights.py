"""Weights in 16 bits where that loses nothing: the same numbers, laid out while the model computes."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from serve_app.engine.decoder.layout import BackgroundDowncast
from serve_app.engine.decoder.linears import HalfWeight, OneDnnWeight, PackedLinear, factor_for, has_kernel
from serve_app.engine.engine import Engine
from tests.engine.conftest import DEMO
from tests.engine.harness import config, make_engine, request, sequences
from tests.engine.laid_out import packed_linears

pytestmark = pytest.mark.skipif(not has_kernel(), reason="this build of torch has no kernel for weights in float16")

PROMPTS = [list(range(20 + 7 * number, 60 + 9 * number)) for number in range(3)]


def priority() -> int:
    """Of this thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.fixture
def random() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16 whose linears are large enough to be laid out, with the demo's tokenizer."""
    torch.manual_seed(1)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096, hidden_size=768, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=12,
            num_key_value_heads=4, tie_word_embeddings=request.param, initializer_range=0.1, eos_token_id=None,
        )
    )  # fmt: skip
    path = tmp_path_factory.mktemp("half")
    made.bfloat16().save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((Path(DEMO) / name).read_bytes())
    return path


def texts(engine: Engine, prompts: list[list[int]], *, between: Callable[[int], None] = lambda step: None) -> list:
    rows = [sequences(engine, request(f"r{at}", max_tokens=24), prompt)[0] for at, prompt in enumerate(prompts)]
    for row in rows:
        engine.add([row])
    step = 0
    while engine.has_work:
        engine.step()
        step += 1
        between(step)
    return [list(row.token_ids[row.prompt_length :]) for row in rows]


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 33])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_in_half_gives_what_the_same_numbers_in_float32_give(
    rows: int, scale: float, dtype: torch.dtype, random: Callable[..., Tensor]
) -> None:
    weight, bias, x = (random(131, 480) * min(scale, 1e4)).to(dtype).float(), random(131), random(rows, 480)
    factor = factor_for(weight)
    assert factor is not None
    kept = HalfWeight(weight, bias, factor)
    expected = (x.double() @ weight.double().T + bias.double()).float()
    torch.testing.assert_close(kept(x), expected, rtol=1e-5, atol=1e-5 * float(weight.abs().max()))
    assert float((kept.dense - weight).norm()) <= 2**-24 * float(weight.norm())
    assert kept.num_bytes * 2 == weight.nbytes


def test_a_weight_that_is_in_float32_for_good_has_no_place_in_half(random: Callable[..., Tensor]) -> None:
    weight = random(64, 64)
    assert factor_for(weight) is None
    assert factor_for(weight.bfloat16().float()) == 1.0


@pytest.mark.parametrize("found", [0.0, float("inf"), float("nan"), 1e-30])
def test_a_weight_of_no_numbers_that_half_could_hold_is_left_alone(found: float) -> None:
    assert factor_for(torch.full((16, 16), found)) is None


def test_texts_go_on_alike_while_linears_are_exchanged_under_them(folder: Path) -> None:
    settings = config(folder, kv_cache_bytes=16 << 20)
    plain, exchanged = make_engine(settings), make_engine(settings)
    expected = texts(plain, PROMPTS)
    assert all(isinstance(each.kept, OneDnnWeight) for each in packed_linears(exchanged.model.module))
    given = texts(exchanged, PROMPTS, between=lambda step: step == 5 and exchanged.model.downcast.run())
    assert given == expected
    assert all(isinstance(each.kept, HalfWeight) for each in packed_linears(exchanged.model.module))
    assert texts(exchanged, PROMPTS) == expected


def test_nothing_keeps_the_former_weights(folder: Path) -> None:
    engine = make_engine(config(folder, kv_cache_bytes=16 << 20))
    former = [weakref.ref(each.kept) for each in packed_linears(engine.model.module)]
    embedding = engine.model.module.get_input_embeddings()
    before = embedding(torch.arange(4096))
    assert engine.model.downcast.run() == len(former) > 4
    gc.collect()
    assert [each for each in former if each() is not None] == []
    assert torch.equal(engine.model.module.get_input_embeddings()(torch.arange(4096)), before)


def test_a_downcast_that_is_stopped_ends_behind_the_linear_that_it_is_at(folder: Path) -> None:
    engine = make_engine(config(folder, kv_cache_bytes=16 << 20))
    engine.model.downcast.stop()
    assert engine.model.downcast.run() == 0
    assert all(isinstance(each.kept, OneDnnWeight) for each in packed_linears(engine.model.module))


def test_it_is_done_in_a_thread_of_its_own_that_others_go_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(config(folder, kv_cache_bytes=16 << 20))
    seen: list[tuple[str, int]] = []
    downcast = engine.model.downcast
    monkeypatch.setattr(downcast, "run", lambda: seen.append((threading.current_thread().name, priority())))
    own = priority()
    downcast.start()
    for thread in threading.enumerate():
        if thread.name == "downcast":
            thread.join()
    assert seen == [("downcast", 19)]
    assert priority() == own


def test_a_form_that_gives_something_else_is_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = HalfWeight.__call__
    monkeypatch.setattr(HalfWeight, "__call__", lambda self, x: wrong(self, x) * 1.001)
    engine = make_engine(config(folder, kv_cache_bytes=16 << 20))
    assert engine.model.downcast.run() == 0


def test_models_in_float32_keep_their_weights() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=768, intermediate_size=768, num_hidden_layers=1, num_attention_heads=12)
    )
    linear = PackedLinear(model.model.layers[0].mlp.down_proj.weight)
    model.model.layers[0].mlp.down_proj = linear
    assert BackgroundDowncast(model).run() == 0
    assert isinstance(linear.kept, OneDnnWeight)
