"""The class `batch` sits out beside prompts of higher classes, in the middle of guesses, forced tokens and scores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest
import torch

from serve_app.constraints.compiler import Compiled, Compiler
from serve_app.core.delta import TokenLogprob
from serve_app.core.prompt import Prompt
from serve_app.core.request import Constraint, GenerationRequest, LogprobParams, SamplingParams
from serve_app.core.shares import BATCH, Share
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.decoder.runner import Runner
from serve_app.engine.engine import Engine
from serve_app.engine.kv.storage import Storage
from serve_app.engine.lora.pool import AdapterBank
from serve_app.engine.scheduler.planner import MOST_WITHOUT
from serve_app.engine.scheduler.sequence import Batch
from serve_app.replica.service import vocabulary_of
from tests.engine.conftest import DEMO
from tests.engine.harness import FreeGuesses, Outcome, collect, config, drain, make_engine, request, sequences
from tests.engine.simulated import NoPace

pytestmark = pytest.mark.slow

TEXT = "Once upon a time there was a little girl. She had a red ball. Once upon a time there was a little"
SCHEMA = {
    "type": "object",
    "properties": {"identifier": {"type": "integer"}, "is_confirmed_by_a_person": {"type": "boolean"}},
    "required": ["identifier", "is_confirmed_by_a_person"],
    "additionalProperties": False,
}
FORCED = Constraint(kind="compact_json", source=json.dumps(SCHEMA), name="json_schema")
HOT = SamplingParams(temperature=0.9, seed=7)
KINDS: Mapping[str, GenerationRequest] = {
    "guesses": request("guesses", max_tokens=40),
    "forced": replace(request("forced", max_tokens=60, sampling=HOT), constraint=FORCED),
    "forced, scored": replace(
        request("forced, scored", max_tokens=60, logprobs=LogprobParams(top=1)), constraint=FORCED
    ),
    "prompt scored": request("prompt scored", max_tokens=4, logprobs=LogprobParams(top=1, whole_prompt=2)),
}


CROWDS = 3, 40
"""Steps before which a crowd of the higher class comes."""


class Watched(Runner):
    """Notes what each step computes."""

    def __init__(self, model: LoadedModel, storage: Storage, bank: AdapterBank) -> None:
        super().__init__(model, storage, bank)
        self.batches: list[Batch] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        return super().forward(batch)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Chunks are small, and rows of logits few."""
    settings = config(DEMO, max_batch_tokens=24, max_logit_rows=6, speculation="prompt_lookup", prefix_cache=False)
    made = make_engine(settings, runner=Watched)
    made.speculator.costs = FreeGuesses()
    made._scheduler.pace = NoPace(2.0)
    return made


@pytest.fixture(scope="module")
def constraint(engine: Engine) -> Compiled:
    tokenizer = engine.tokenizer  # type: ignore[attr-defined]
    compiler = Compiler(lambda: vocabulary_of(tokenizer, engine.model.eos_token_ids), encode=tokenizer.encode_literal)
    try:
        return asyncio.run(compiler.compile(FORCED))
    finally:
        compiler.close()


def begin(engine: Engine, asked: GenerationRequest, constraint: Compiled, *, times: int) -> None:
    """times: how often its prompt has the same sentences"""
    prompt = engine.tokenizer.encode(Prompt(parts=(TEXT * times,)))  # type: ignore[attr-defined]
    made = sequences(engine, asked, prompt)
    for each in made if asked.constraint is not None else ():
        each.matcher = constraint.matcher()
    engine.add(made)


def assert_same(found: Outcome, alone: Outcome) -> None:
    assert (found.text, found.token_ids, found.finish) == (alone.text, alone.token_ids, alone.finish)
    reports = [[each.prompt.whole_logprobs for each in of.deltas if each.prompt] for of in (found, alone)]
    scores = [[*of.logprobs, *(report[0] or ())] for of, report in zip((found, alone), reports, strict=True)]
    for one, other in zip(*scores, strict=True):
        assert isinstance(one, TokenLogprob)
        assert isinstance(other, TokenLogprob)
        assert (one.token_id, one.text) == (other.token_id, other.text)
        assert one.logprob == (other.logprob and pytest.approx(other.logprob, abs=1e-4))


@pytest.mark.law("Company")
def test_guesses_forced_tokens_and_scores_of_prompts_are_those_alone_in_both_classes(
    engine: Engine, constraint: Compiled
) -> None:
    """The second crowd of the higher class finds the class `batch` in the middle of its texts, the first of prompts."""
    alone: dict[tuple[str, str], Outcome] = {}
    for (name, asked), times in product(KINDS.items(), (1, 3)):
        begin(engine, asked, constraint, times=times)
        alone[name, "batch" if times == 1 else "crowd"] = drain(engine)[name, 0]
    runner, num_accepted, num_forced = engine._runner, engine.load.num_accepted_tokens, engine._output.num_forced
    assert isinstance(runner, Watched)
    runner.batches.clear()

    for name, asked in KINDS.items():
        later = Share(flow="later", priority=BATCH)
        begin(engine, replace(asked, request_id=f"{name}/batch", share=later), constraint, times=1)
    found: dict[tuple[str, int], Outcome] = {}
    for number in range(CROWDS[-1] + 1):
        for name, asked in KINDS.items() if number in CROWDS else ():
            begin(engine, replace(asked, request_id=f"{name}/crowd/{number}"), constraint, times=3)
        collect(found, engine.step())
        engine.check_integrity()
    for outcome in drain(engine).values():
        collect(found, outcome.deltas)

    assert len(found) == 3 * len(KINDS)
    for (request_id, _), outcome in found.items():
        name, kind, *_ = request_id.split("/")
        assert_same(outcome, alone[name, kind])
    assert engine.load.num_accepted_tokens > num_accepted
    assert engine._output.num_forced > num_forced
    assert_rule(runner.batches[CROWDS[-1] :])


def assert_rule(batches: list[Batch]) -> None:
    """Beside prompts of a higher class the class batch is in every ninth step, and in no other."""

    def numbers(*, decoding: bool) -> list[int]:
        """Steps in which something of the class batch decodes, or prompts of the other class are computed."""
        return [
            number
            for number, batch in enumerate(batches)
            for span in batch.spans
            if (span.sequence.request.share.priority == BATCH, span.decodes) == (decoding, decoding)
        ]

    beside = range(0, max(numbers(decoding=False)) + 1)
    assert sorted({*numbers(decoding=True)} & {*beside}) == [*beside[MOST_WITHOUT :: MOST_WITHOUT + 1]] != []
