"""Law: hidden states and chosen experts are those of one direct forward, whatever is computed beside them and how."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from serve_app.core.delta import Recording
from serve_app.core.errors import EngineFailed, InvalidRequest
from serve_app.core.request import EmbeddingForm, HiddenStates, Pooling, RecordParams
from serve_app.engine.decoder.record import Record, RecordBounds
from serve_app.engine.decoder.runner import Runner
from serve_app.engine.scheduler.sequence import Batch
from tests.engine.conftest import DEMO, DEMO_ADAPTERS
from tests.engine.harness import Outcome, complete, config, make_engine, request
from tests.families.making import save_model

MIXTURES: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {"mlp_only_layers": [0], "num_hidden_layers": 3},  # a dense layer in front
}
DENSE: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "opt": {"word_embed_proj_dim": 16},
}
EVERYTHING = RecordParams(hidden_states="all", experts=True)
CLOSE = 2e-5  # in float32, relative to the largest number: two orders of the same sums


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a small random model."""
    root = tmp_path_factory.mktemp("records")

    def make(family: str) -> Path:
        path = root / family
        if not path.exists():
            save_model(family, {**MIXTURES, **DENSE}[family], path)
        return path

    return make


def make_prompts(seed: int = 5) -> list[list[int]]:
    """From one token to several chunks, two that begin alike."""
    draw = random.Random(seed)
    shared = [draw.randrange(250) for _ in range(48)]
    return [[draw.randrange(250) for _ in range(length)] for length in (1, 7, 90)] + [[*shared, 3, 4], shared]


class Direct:
    """transformers' own forward of whole texts."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="float32").eval()

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> Tensor:
        """[tokens, hidden]"""
        output = self._model(input_ids=torch.tensor([token_ids]), output_hidden_states=True)
        states: Tensor = output.hidden_states[-1][0]
        return states

    @torch.inference_mode()
    def experts(self, token_ids: list[int], num_layers: int) -> Tensor:
        """[tokens, layers, experts per token], from the routers' logits by their definition"""
        output = self._model(input_ids=torch.tensor([token_ids]), output_router_logits=True)
        chosen = [torch.topk(logits, self._model.config.num_experts_per_tok).indices for logits in output.router_logits]
        dense = [torch.full_like(chosen[0], -1)] * (num_layers - len(chosen))
        return torch.stack(dense + chosen, dim=1)


def recording_of(outcome: Outcome) -> Recording:
    *earlier, last = outcome.deltas
    assert all(delta.recording is None for delta in earlier), "recorded before the end"
    assert last.recording is not None
    return last.recording


def states_of(recording: Recording) -> Tensor:
    return torch.frombuffer(bytearray(recording.hidden_states), dtype=torch.float32).view(recording.num_states, -1)


def experts_of(recording: Recording) -> Tensor:
    return torch.frombuffer(bytearray(recording.experts), dtype=torch.int32).view(recording.experts_shape)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= CLOSE * float(expected.abs().max())


def check(folder: Path, *, max_tokens: int = 5, **limits: Any) -> Any:
    """Everything of every position, twice, so that the second time all is cached."""
    engine, direct = make_engine(config(folder, **limits)), Direct(folder)
    num_layers = int(engine.model.module.config.num_hidden_layers)
    prompts = make_prompts()
    for attempt in ("cold", "cached"):
        asked = [
            (request(f"{attempt}{i}", max_tokens=max_tokens, n=1 + i % 3, record=EVERYTHING), prompt)
            for i, prompt in enumerate(prompts)
        ]
        asked.append((request(f"{attempt} plain", max_tokens=max_tokens), prompts[2]))
        outcomes = complete(engine, asked)
        assert all(delta.recording is None for delta in outcomes[f"{attempt} plain", 0].deltas)
        for i, prompt in enumerate(prompts):
            for sample in range(1 + i % 3):
                outcome = outcomes[f"{attempt}{i}", sample]
                computed = (prompt + outcome.token_ids)[:-1]
                recording = recording_of(outcome)
                assert_close(states_of(recording), direct.states(computed))
                if folder.name in MIXTURES:
                    assert torch.equal(experts_of(recording), direct.experts(computed, num_layers))
                else:
                    assert recording.experts == b""
    return engine


@pytest.mark.law("Records")
@pytest.mark.parametrize("family", [*MIXTURES, *DENSE])
def test_every_position_equals_a_direct_forward_in_chunks_forks_and_company(
    family: str, folder: Callable[[str], Path]
) -> None:
    check(folder(family))


@pytest.mark.law("Records")
def test_every_position_equals_a_direct_forward_under_preemption(folder: Callable[[str], Path]) -> None:
    path = folder("qwen3_moe")
    model = make_engine(config(path)).model
    per_block = model.shape.bytes_per_token(model.dtype) * 16
    engine = check(path, max_tokens=30, kv_cache_bytes=per_block * 9)
    assert engine.num_preemptions > 0, "the store was not small enough to matter"


POSITIONS: Mapping[HiddenStates, Callable[[Tensor, int], Tensor]] = {
    "all": lambda states, prompt: states,
    "drawn": lambda states, prompt: states[prompt - 1 :],
    "last": lambda states, prompt: states[-1:],
}


@pytest.mark.parametrize("wanted", POSITIONS)
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_the_positions_are_those_that_were_asked_for(
    wanted: HiddenStates, max_tokens: int, folder: Callable[[str], Path]
) -> None:
    engine, direct = make_engine(config(folder("llama"))), Direct(folder("llama"))
    prompt = make_prompts()[2]
    asked = request("a", max_tokens=max_tokens, n=2, record=RecordParams(hidden_states=wanted))
    for outcome in complete(engine, [(asked, prompt)]).values():
        computed = prompt + outcome.token_ids[:-1]
        expected = POSITIONS[wanted](direct.states(computed), len(prompt))
        assert_close(states_of(recording_of(outcome)), expected)


def test_an_echo_of_the_last_tokens_has_the_states_of_these(folder: Callable[[str], Path]) -> None:
    engine, direct = make_engine(config(folder("llama"))), Direct(folder("llama"))
    prompt = make_prompts()[2]
    asked = request("a", max_tokens=3, record=RecordParams(hidden_states="all", echoed=2))
    outcome = complete(engine, [(asked, prompt)])["a", 0]
    assert_close(states_of(recording_of(outcome)), direct.states(prompt + outcome.token_ids[:-1])[-4:])


@pytest.mark.law("Records")
@pytest.mark.parametrize("max_batch_tokens", [7, 40, 512])
def test_the_mean_is_the_same_in_any_chunks_and_whatever_is_cached(
    max_batch_tokens: int, folder: Callable[[str], Path]
) -> None:
    engine = make_engine(config(folder("llama"), max_batch_tokens=max_batch_tokens))
    direct, prompts = Direct(folder("llama")), make_prompts()
    params = RecordParams(hidden_states="mean", embedding=EmbeddingForm())
    for attempt in range(2):
        asked = [(request(f"{attempt}{i}", max_tokens=0, record=params), prompt) for i, prompt in enumerate(prompts)]
        outcomes = complete(engine, asked)
        for i, prompt in enumerate(prompts):
            mean = direct.states(prompt).mean(dim=0, keepdim=True)
            assert_close(states_of(recording_of(outcomes[f"{attempt}{i}", 0])), mean / mean.norm())
            report = outcomes[f"{attempt}{i}", 0].deltas[0].prompt
            assert report is not None
            assert report.num_cached_tokens == 0


def weighted(states: Tensor) -> Tensor:
    places = torch.arange(1, len(states) + 1)[:, None]
    return (states * places).sum(dim=0) / places.sum()


POOLED: dict[Pooling, Callable[[Tensor], Tensor]] = {
    "mean": lambda states: states.mean(dim=0),
    "last": lambda states: states[-1],
    "first": lambda states: states[0],
    "max": lambda states: states.amax(dim=0),
    "mean_sqrt": lambda states: states.sum(dim=0) / len(states) ** 0.5,
    "weighted_mean": weighted,
}


@pytest.mark.parametrize("normalizes", [False, True])
def test_every_pooling_is_its_formula_over_the_states_of_a_whole_forward(
    normalizes: bool, folder: Callable[[str], Path]
) -> None:
    engine, direct = make_engine(config(folder("llama"), max_batch_tokens=7)), Direct(folder("llama"))
    prompt = make_prompts()[2]
    asked = []
    for pooling in POOLED:
        form = EmbeddingForm(pooling=pooling, normalizes=normalizes)
        record = RecordParams(hidden_states=pooling, embedding=form)
        asked.append((request(pooling, max_tokens=0, record=record), prompt))
    outcomes = complete(engine, asked)
    for pooling, formula in POOLED.items():
        expected = formula(direct.states(prompt))[None]
        found = states_of(recording_of(outcomes[pooling, 0]))
        assert_close(found, expected / expected.norm() if normalizes else expected)


def test_the_last_state_is_had_beside_a_cached_prefix(folder: Callable[[str], Path]) -> None:
    engine, direct = make_engine(config(folder("llama"))), Direct(folder("llama"))
    prompt = make_prompts()[2]
    params = RecordParams(hidden_states="last", embedding=EmbeddingForm(), dimensions=8)
    for attempt, num_cached in (("cold", 0), ("cached", 80)):
        outcome = complete(engine, [(request(attempt, max_tokens=0, record=params), prompt)])[attempt, 0]
        last = direct.states(prompt)[-1:, :8]
        assert_close(states_of(recording_of(outcome)), last / last.norm())
        report = outcome.deltas[0].prompt
        assert report is not None
        assert report.num_cached_tokens == num_cached


def test_an_adapters_states_are_those_of_the_model_with_it() -> None:
    from peft import PeftModel

    adapter = DEMO_ADAPTERS / "pirate"
    engine = make_engine(config(DEMO), {"pirate": adapter})
    base = AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True, dtype="float32")
    prompt = [5, 300, 12, 77, 41, 9]
    asked = [
        (request("base", max_tokens=0, record=RecordParams(hidden_states="all")), prompt),
        (request("adapted", adapter="pirate", max_tokens=0, record=RecordParams(hidden_states="all")), prompt),
    ]
    outcomes = complete(engine, asked)
    assert_close(states_of(recording_of(outcomes["base", 0])), states_by(base, prompt))
    adapted = PeftModel.from_pretrained(base, str(adapter)).eval()
    assert_close(states_of(recording_of(outcomes["adapted", 0])), states_by(adapted, prompt))


@torch.inference_mode()
def states_by(model: Any, prompt: list[int]) -> Tensor:
    output = model(input_ids=torch.tensor([prompt]), output_hidden_states=True)
    states: Tensor = output.hidden_states[-1][0]
    return states


@pytest.mark.law("Records")
def test_nothing_is_watched_in_steps_of_which_nobody_wants_anything(folder: Callable[[str], Path]) -> None:
    engine = make_engine(config(folder("mixtral")))
    seen: list[tuple[int, bool]] = []
    forward = engine._runner.forward

    def watched(batch: Batch) -> Tensor:
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.model.module.modules())
        seen.append((hooks, any(span.sequence.record is not None for span in batch.spans)))
        return forward(batch)

    engine._runner.forward = watched  # type: ignore[method-assign]
    complete(engine, [(request("plain", max_tokens=4), [1, 2, 3])])
    complete(engine, [(request("asks", max_tokens=4, record=EVERYTHING), [1, 2, 3])])
    assert [hooks > 0 for hooks, _ in seen] == [asks for _, asks in seen]
    assert {asks for _, asks in seen} == {True, False}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in engine.model.module.modules())


def test_a_kept_state_does_not_keep_those_of_the_whole_step() -> None:
    step = torch.randn(512, 16)
    record = Record(RecordParams(hidden_states="last"), 512, num_layers=1)
    record.take(0, step, {})
    (kept,) = record._states
    assert kept.untyped_storage().nbytes() == 16 * 4


class Poisoned(Runner):
    """Gives hidden states that are no numbers."""

    def forward(self, batch: Batch) -> Tensor:
        head = self._model.module.get_output_embeddings()
        norm = self._model.module.get_decoder().norm
        hook = norm.register_forward_hook(lambda *_: torch.full((1, sum(s.length for s in batch.spans), 32), torch.nan))
        try:
            assert head is not None
            return super().forward(batch)
        finally:
            hook.remove()


def test_states_that_are_no_numbers_are_an_error_and_are_not_cached(folder: Callable[[str], Path]) -> None:
    engine = make_engine(config(folder("llama")), runner=Poisoned)
    prompt = make_prompts()[2]
    asked = request("a", max_tokens=0, record=RecordParams(hidden_states="mean"))
    outcome = complete(engine, [(asked, prompt)])["a", 0]
    assert isinstance(outcome.deltas[-1].error, EngineFailed)
    assert engine.load.num_cached_blocks == 0


BOUNDS = RecordBounds(hidden_size=10, num_layers=3, num_chosen=2, max_bytes=1000)


@pytest.mark.parametrize(
    ("params", "prompt", "max_tokens", "n", "is_taken"),
    [
        (RecordParams(hidden_states="all"), 20, 6, 1, True),  # 25 states of 40 bytes
        (RecordParams(hidden_states="all"), 20, 7, 1, False),
        (RecordParams(hidden_states="drawn"), 500, 25, 1, True),
        (RecordParams(hidden_states="drawn"), 500, 13, 2, False),
        (RecordParams(hidden_states="last"), 500, 500, 25, True),
        (RecordParams(hidden_states="last"), 500, 500, 26, False),
        (RecordParams(experts=True), 41, 1, 1, True),  # 41 positions of 24 bytes
        (RecordParams(experts=True), 41, 2, 1, False),
        (RecordParams(hidden_states="mean"), 500, 0, 1, True),
    ],
)
def test_what_may_be_kept_is_bounded_before_anything_is_computed(
    params: RecordParams, prompt: int, max_tokens: int, n: int, is_taken: bool
) -> None:
    asked = request("a", max_tokens=max_tokens, n=n, record=params)
    if is_taken:
        assert len(BOUNDS.records(asked, prompt, max_tokens=max_tokens)) == n
        return
    with pytest.raises(InvalidRequest, match="at most 1000 bytes for a prompt with its completions"):
        BOUNDS.records(asked, prompt, max_tokens=max_tokens)
