"""Runs an engine without threads or services, and transformers' `generate` as the reference beside it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from serve_app.core.delta import Delta
from serve_app.core.names import ModelRef, Part, mixed
from serve_app.core.prompt import Prompt
from serve_app.core.request import GenerationRequest, LogprobParams, RecordParams, SamplingParams, StopParams
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.loading import load_with_tokenizer
from serve_app.engine.decoder.record import RecordBounds
from serve_app.engine.decoder.runner import Runner
from serve_app.engine.driver import ReplicaEngine
from serve_app.engine.engine import Engine
from serve_app.engine.kv.storage import KeyValueShape, LayerShape
from serve_app.engine.scheduler.sequence import Sequence
from serve_app.engine.speculation.speculator import StepCosts
from serve_app.replica.service import ModelService
from serve_app.text.tokenizer import TextTokenizer
from tests.engine.adapter_files import load_adapter

GREEDY = SamplingParams(temperature=0.0)


def uniform(*, layers: int, heads: int, key_dim: int, value_dim: int) -> KeyValueShape:
    """Return the shape of a model whose layers are all alike."""
    return KeyValueShape(layers=(LayerShape(heads=heads, key_dim=key_dim, value_dim=value_dim),) * layers)


def config(path: Path | str, **changes: object) -> EngineConfig:
    """Small limits, so that chunks, hits and preemption happen to small prompts."""
    plain = EngineConfig(
        name="toy", path=str(path), dtype="float32", max_num_sequences=8, max_batch_tokens=40, kv_cache_bytes=64 << 20
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def make_engine(
    settings: EngineConfig,
    adapters: dict[str, Path] | None = None,
    *,
    eos_token_ids: frozenset[int] | None = None,
    runner: type[Runner] = Runner,
) -> Engine:
    """adapters: folder by version; the version doubles as the adapter's name
    eos_token_ids: in place of the model's own
    """
    model, tokenizer = load_with_tokenizer(settings)
    if eos_token_ids is not None:
        model = replace(model, eos_token_ids=eos_token_ids)
    bound = [load_adapter(folder, version=version, model=model.module) for version, folder in (adapters or {}).items()]
    engine = Engine(settings, model, tokenizer, bound, runner=runner)
    engine.tokenizer = tokenizer  # type: ignore[attr-defined]
    return engine


def engine_of(service: ModelService) -> ReplicaEngine:
    assert isinstance(service.engine, ReplicaEngine)
    return service.engine


def core_of(service: ModelService) -> Engine:
    """The engine itself, behind what its replica sees of it."""
    core: Engine = service.engine.core  # type: ignore[attr-defined]  # vLLM's has what tests ask here, too
    return core


def request(
    name: str,
    *,
    max_tokens: int = 12,
    adapter: str | None = None,
    mix: Mapping[str, float] | None = None,
    sampling: SamplingParams = GREEDY,
    n: int = 1,
    logprobs: LogprobParams | None = None,
    stop: tuple[str, ...] = (),
    echo: bool = False,
    prompt_index: int = 0,
    record: RecordParams | None = None,
    prediction: tuple[int, ...] = (),
) -> GenerationRequest:
    """adapter: its name, which is its version, too;  mix: several of them, each with its scale"""
    parts = [Part(adapter=name, version=name, scale=scale) for name, scale in (mix or {}).items()]
    return GenerationRequest(
        request_id=name,
        model=mixed("toy", parts) if parts else ModelRef(base="toy", adapter=adapter, version=adapter or ""),
        prompt=Prompt(parts=((0,),)),
        prompt_index=prompt_index,
        n=n,
        sampling=sampling,
        stop=StopParams(max_tokens=max_tokens, strings=stop),
        logprobs=logprobs,
        echo=echo,
        record=record,
        prediction=prediction,
    )


def sequences(engine: Engine, asked: GenerationRequest, prompt_ids: Items[int]) -> list[Sequence]:
    tokenizer: TextTokenizer = engine.tokenizer  # type: ignore[attr-defined]
    room = engine.model.max_model_len - len(prompt_ids)
    wanted = asked.stop.max_tokens
    max_tokens = room if wanted is None else min(wanted, room)
    records = record_bounds_of(engine).records(asked, len(prompt_ids), max_tokens=max_tokens)
    return [
        Sequence(
            asked,
            prompt_ids,
            sample=sample,
            max_tokens=max_tokens,
            detokenizer=tokenizer.detokenizer(prompt_ids),
            record=records[sample],
            prediction=() if isinstance(asked.prediction, str) else asked.prediction,
        )
        for sample in range(asked.n)
    ]


def record_bounds_of(engine: Engine) -> RecordBounds:
    """Made once for each engine, as a service does: every module is looked at for experts."""
    if not hasattr(engine, "record_bounds"):
        engine.record_bounds = RecordBounds.of(engine.model.module, max_bytes=1 << 30)  # type: ignore[attr-defined]
    found: RecordBounds = engine.record_bounds
    return found


@dataclass
class Outcome:
    """All that a sequence's deltas said."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)

    @property
    def finish(self) -> object:
        return self.deltas[-1].finish

    @property
    def logprobs(self) -> list[object]:
        return [entry for delta in self.deltas for entry in delta.logprobs]


def drain(engine: Engine, *, max_steps: int = 5000) -> dict[tuple[str, int], Outcome]:
    """Step until there is no work, checking conservation after each step."""
    outcomes: dict[tuple[str, int], Outcome] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return outcomes
        collect(outcomes, engine.step())
        engine.check_integrity()
    raise AssertionError(f"still at work after {max_steps} steps")


class FreeGuesses(StepCosts):
    """As if guesses cost nothing: all that there are are computed, whatever a clock says."""

    def plain_s(self, num_sequences: int) -> float | None:
        return 1.0

    def extra_s(self, num_sequences: int, num_guesses: int) -> float:
        return 0.0


def collect(outcomes: dict[tuple[str, int], Outcome], deltas: Items[Delta]) -> None:
    for delta in deltas:
        outcome = outcomes.setdefault((delta.request_id, delta.sample), Outcome())
        outcome.text += delta.text
        outcome.token_ids += delta.token_ids
        outcome.deltas.append(delta)


def complete(engine: Engine, asked: Items[tuple[GenerationRequest, Items[int]]]) -> dict[tuple[str, int], Outcome]:
    """Submit everything at once and run to the end."""
    for one, prompt_ids in asked:
        engine.add(sequences(engine, one, prompt_ids))
    return drain(engine)


def reference_greedy(module: torch.nn.Module, prompt_ids: Items[int], max_tokens: int) -> list[int]:
    """transformers' own greedy continuation, the end token included where it comes."""
    ids = torch.tensor([list(prompt_ids)])
    with torch.inference_mode():
        out = module.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(prompt_ids) :]]
