"""The engine's laws under random schedules: conservation, one ending each, company changes nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.delta import Finish, FinishReason
from serve_app.core.errors import EngineFailed
from serve_app.core.prompt import Prompt
from serve_app.core.request import GenerationRequest, LogprobParams, SamplingParams
from serve_app.engine.decoder.runner import Runner
from serve_app.engine.engine import Engine
from serve_app.engine.scheduler.sequence import Batch
from tests.engine.conftest import DEMO, DEMO_ADAPTERS
from tests.engine.harness import FreeGuesses, Outcome, collect, complete, config, drain, make_engine, request, sequences

pytestmark = pytest.mark.slow


@cache
def adapter_names() -> tuple[str | None, ...]:
    found = [folder.name for folder in sorted(DEMO_ADAPTERS.glob("*/")) if list(folder.glob("*.safetensors"))]
    return (None, *found)


@cache
def engine_of(max_batch_tokens: int, num_blocks: int, max_adapters: int, *, guesses: bool = False) -> Engine:
    """Engines are reused between examples: that they come back clean is part of the law."""
    folders = {name: DEMO_ADAPTERS / name for name in adapter_names() if name is not None}
    bytes_per_block = 6 * 2 * (32 + 32) * 4 * 16
    engine = make_engine(
        config(
            DEMO,
            speculation="prompt_lookup" if guesses else "none",
            max_batch_tokens=max_batch_tokens,
            kv_cache_bytes=bytes_per_block * num_blocks,
            max_adapters=max_adapters,
            max_num_sequences=6,
        ),
        folders,
    )
    engine.speculator.costs = FreeGuesses()
    return engine


def random_request(generator: random.Random, name: str) -> tuple[GenerationRequest, list[int]]:
    beginning = [50 + i for i in range(generator.choice([0, 0, 20, 40]))]
    prompt = beginning + [generator.randrange(20, 1000) for _ in range(generator.randrange(1, 30))]
    is_scored = generator.random() < 0.3
    asked = request(
        name,
        max_tokens=generator.choice([0, 1, 2, 7, 15]),
        adapter=generator.choice(adapter_names()),
        n=generator.choice([1, 1, 1, 3]),
        sampling=SamplingParams(
            temperature=generator.choice([0.0, 0.8, 1.5]),
            top_k=generator.choice([0, 0, 5]),
            top_p=generator.choice([1.0, 0.9]),
            seed=generator.getrandbits(60),
        ),
        logprobs=LogprobParams(top=1, prompt=generator.random() < 0.5) if is_scored else None,
        stop=generator.choice([(), (), ("e ",), ("the", "a b c")]),
        prediction=tuple(generator.choice(prompt) for _ in range(generator.choice([0, 20]))),
    )
    return asked, prompt


@pytest.mark.law("Company")
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_batch_tokens=st.sampled_from([3, 17, 64]),
    num_blocks=st.sampled_from([8, 12, 60]),
    max_adapters=st.sampled_from([1, 2]),
    guesses=st.booleans(),
)
def test_random_schedules_keep_the_laws(
    seed: int, max_batch_tokens: int, num_blocks: int, max_adapters: int, guesses: bool
) -> None:
    engine = engine_of(max_batch_tokens, num_blocks, max_adapters, guesses=guesses)
    keep_the_laws(engine, engine_of(64, 60, 2), seed)


def keep_the_laws(engine: Engine, reference: Engine, seed: int) -> None:
    """Have an engine compute a random schedule, and the reference each request that was not aborted, alone."""
    generator = random.Random(seed)
    asked = dict[str, tuple[GenerationRequest, list[int]]]()
    outcomes: dict[tuple[str, int], Outcome] = {}
    aborted: set[str] = set()
    to_come = [f"r{i}" for i in range(generator.randrange(1, 9))]
    for _ in range(4000):
        if to_come and generator.random() < 0.4:
            name = to_come.pop()
            asked[name] = random_request(generator, name)
            engine.add(sequences(engine, *asked[name]))
        if asked and generator.random() < 0.03:
            name = generator.choice(list(asked))
            samples = [outcomes.get((name, sample)) for sample in range(asked[name][0].n)]
            if not all(outcome is not None and outcome.finish is not None for outcome in samples):
                aborted.add(name)
            engine.abort(frozenset([name]))
        collect(outcomes, engine.step())
        engine.check_integrity()
        if not to_come and not engine.has_work:
            break
    assert not engine.has_work
    assert engine.load.num_running == 0
    assert engine.load.num_free_blocks == engine.load.num_blocks
    survivors = [name for name in asked if name not in aborted]
    for name in survivors:
        one, prompt = asked[name]
        alone = complete(reference, [(one, prompt)])
        for sample in range(one.n):
            got, expected = outcomes[name, sample], alone[name, sample]
            endings = [delta for delta in got.deltas if delta.finish is not None or delta.error is not None]
            assert len(endings) == 1, f"{name}#{sample} ended {len(endings)} times"
            assert endings[0] is got.deltas[-1]
            assert (got.text, got.token_ids) == (expected.text, expected.token_ids), f"{name}#{sample}"
            assert without_guesses(got.finish) == without_guesses(expected.finish)
            reports = [delta.prompt for delta in got.deltas if delta.prompt is not None]
            assert len(reports) == (1 if sample == 0 else 0)


def without_guesses(finish: object) -> Finish:
    """The same but for what was guessed, which depends on what else is computed."""
    assert isinstance(finish, Finish)
    return replace(finish, predicted=None)


class FailingRunner(Runner):
    """Computes every batch but the first."""

    num_batches = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        self.num_batches += 1
        if self.num_batches == 1:
            raise RuntimeError("out of memory")
        return super().forward(batch)


class PoisoningRunner(Runner):
    """Gives no numbers for the first row of the first batch."""

    num_batches = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        logits = super().forward(batch).clone()
        self.num_batches += 1
        if self.num_batches == 1:
            logits[0] = torch.nan
        return logits


def test_a_failing_step_ends_its_sequences_with_an_error_and_the_engine_goes_on() -> None:
    engine = make_engine(config(DEMO), runner=FailingRunner)
    engine.add(sequences(engine, request("doomed", n=2), [50, 60, 70]))
    lost = engine.step()
    assert {(delta.request_id, delta.sample) for delta in lost} == {("doomed", 0), ("doomed", 1)}
    assert all(isinstance(delta.error, EngineFailed) for delta in lost)
    engine.check_integrity()
    after = complete(engine, [(request("next"), [50, 60, 70])])["next", 0]
    assert (
        after.token_ids == complete(make_engine(config(DEMO)), [(request("next"), [50, 60, 70])])["next", 0].token_ids
    )


@pytest.mark.law("Isolation")
def test_a_row_that_is_no_number_fails_alone() -> None:
    engine = make_engine(config(DEMO), runner=PoisoningRunner)
    for name in ("poisoned", "healthy"):
        engine.add(sequences(engine, request(name), [50, 60, 70, 80]))
    outcomes: dict[tuple[str, int], Outcome] = {}
    collect(outcomes, engine.step())
    collect(outcomes, [delta for outcome in drain(engine).values() for delta in outcome.deltas])
    assert isinstance(outcomes["poisoned", 0].deltas[-1].error, EngineFailed)
    assert outcomes["healthy", 0].finish is not None
    assert outcomes["healthy", 0].finish.reason in {FinishReason.STOP, FinishReason.LENGTH}  # type: ignore[attr-defined]
    engine.check_integrity()


@pytest.mark.law("Whole text")
def test_shown_text_ends_before_the_stop_and_logprobs_with_it() -> None:
    engine = make_engine(config(DEMO))
    prompt = engine.tokenizer.encode(Prompt(parts=("Once upon a time",)))  # type: ignore[attr-defined]
    free = complete(engine, [(request("free", max_tokens=30), prompt)])["free", 0]
    assert len(free.text) > 12
    stop = free.text[5:9]
    cut = complete(engine, [(request("cut", max_tokens=30, stop=(stop,), logprobs=LogprobParams(top=0)), prompt)])[
        "cut", 0
    ]
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.deltas[-1].finish is not None
    assert cut.deltas[-1].finish.matched_stop == stop
    assert all(entry.offset < len(cut.text) for entry in cut.logprobs)  # type: ignore[attr-defined]
    assert len(cut.logprobs) > 0


def test_a_stop_that_waited_for_an_earlier_one_is_reported_when_the_text_ends() -> None:
    engine = make_engine(config(DEMO))
    prompt = engine.tokenizer.encode(Prompt(parts=("Once upon a time",)))  # type: ignore[attr-defined]
    free = complete(engine, [(request("free", max_tokens=9), prompt)])["free", 0]
    whole = free.text
    stops = (whole[-2:], whole[-4:] + "never")  # the second begins earlier and could still come
    cut = complete(engine, [(request("cut", max_tokens=9, stop=stops), prompt)])["cut", 0]
    assert cut.deltas[-1].finish is not None
    assert cut.deltas[-1].finish.matched_stop == stops[0]
    assert cut.deltas[-1].finish.reason is FinishReason.STOP
    assert cut.text == whole[: whole.index(stops[0])]
