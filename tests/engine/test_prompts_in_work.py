"""Law: a prompt that is just being computed is computed once, and nobody waits for one that will not be there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.core.delta import FinishReason
from serve_app.core.names import Part, mixed
from serve_app.core.request import GenerationRequest, LogprobParams, RecordParams
from serve_app.engine.engine import Engine
from tests.engine.harness import collect, complete, config, drain, make_engine, request, sequences
from tests.engine.test_adapter_prefix import LAST
from tests.engine.test_adapters import train_nothing

pytestmark = pytest.mark.slow

PROMPT = list(range(20, 120))  # three steps of 40 tokens


def engine_of(random_models: Path, **changes: object) -> Engine:
    return make_engine(config(random_models / "llama", **changes))


def num_computed(engine: Engine, asked: list[GenerationRequest]) -> int:
    """Tokens of prompts that the steps computed."""
    for each in asked:
        engine.add(sequences(engine, each, PROMPT))
    total = 0
    schedule = engine._scheduler.schedule

    def counted() -> object:
        nonlocal total
        batch = schedule()
        total += batch.num_prompt_tokens
        return batch

    engine._scheduler.schedule = counted  # type: ignore[method-assign, assignment]
    drain(engine)
    return total


@pytest.mark.law("Computed once")
def test_equal_prompts_that_come_together_are_computed_once(random_models: Path) -> None:
    asked = [request(f"{i}", max_tokens=4) for i in range(6)]
    rest = len(PROMPT) % 16
    assert num_computed(engine_of(random_models), asked) <= len(PROMPT) + 5 * rest
    assert num_computed(engine_of(random_models, prefix_cache=False), asked) == 6 * len(PROMPT)
    uncached = [replace(each, uses_cache=False) for each in asked]
    assert num_computed(engine_of(random_models), uncached) == 6 * len(PROMPT), "who wants none of it waits for none"


@pytest.mark.law("Computed once")
def test_a_long_prefix_of_prompts_that_come_together_is_computed_once(random_models: Path) -> None:
    """Whoever was first, the others find what they share and do not wait for one another's ends."""
    engine = engine_of(random_models, max_batch_tokens=512)
    prompts = [[*PROMPT[:96], *range(200 + 7 * i, 207 + 7 * i)] for i in range(6)]
    for i, prompt in enumerate(prompts):
        engine.add(sequences(engine, request(f"{i}", max_tokens=4), prompt))
    computed = []
    schedule = engine._scheduler.schedule

    def counted() -> object:
        batch = schedule()
        computed.append(batch.num_prompt_tokens)
        return batch

    engine._scheduler.schedule = counted  # type: ignore[method-assign, assignment]
    outcomes = drain(engine)
    assert sum(computed) == 96 + 6 * 7
    assert [each for each in computed if each] == [103, 35], "five ends in one step"
    for i, prompt in enumerate(prompts):
        alone = complete(engine_of(random_models), [(request(f"{i}", max_tokens=4), prompt)])
        assert outcomes[f"{i}", 0].token_ids == alone[f"{i}", 0].token_ids


def steps_of(engine: Engine) -> list[int]:
    """Tokens of prompts in each step from now on, where there were some."""
    computed: list[int] = []
    schedule = engine._scheduler.schedule

    def counted() -> object:
        batch = schedule()
        computed.extend([batch.num_prompt_tokens] if batch.num_prompt_tokens else [])
        return batch

    engine._scheduler.schedule = counted  # type: ignore[method-assign, assignment]
    return computed


@pytest.mark.law("Computed once")
def test_many_ends_of_prompts_on_one_prefix_are_computed_in_one_step_with_the_first_ones(random_models: Path) -> None:
    """What they share is taken before it is published, at the token behind which they differ."""
    engine = engine_of(random_models, max_batch_tokens=128, max_num_sequences=16)
    asked = [(request(f"{i}", max_tokens=4), [*PROMPT[:89], *range(200 + 7 * i, 207 + 7 * i)]) for i in range(12)]
    computed = steps_of(engine)
    outcomes = complete(engine, asked)
    assert computed == [89, 12 * 7]
    for i, one in enumerate(asked):
        alone = complete(engine_of(random_models, max_num_sequences=16), [one])
        assert outcomes[f"{i}", 0].token_ids == alone[f"{i}", 0].token_ids
        report = outcomes[f"{i}", 0].deltas[0].prompt
        assert report is not None
        assert report.num_cached_tokens == (89 if i else 0)


def test_who_shares_more_and_more_with_one_does_not_cut_its_prompt_into_crumbs(random_models: Path) -> None:
    engine = engine_of(random_models, max_batch_tokens=128, max_num_sequences=16)
    for i in range(12):
        prompt = [*PROMPT[: 100 - i], *range(300, 300 + 2 * i)]
        engine.add(sequences(engine, request(f"{i}", max_tokens=4), prompt))
    computed = steps_of(engine)
    outcomes = drain(engine)
    assert computed[0] == 100
    assert len(outcomes) == 12


def test_who_shares_what_takes_several_steps_begins_when_that_is_computed(random_models: Path) -> None:
    engine = engine_of(random_models, max_batch_tokens=40)
    for i in range(3):
        prompt = [*PROMPT[:70], *range(200 + 30 * i, 230 + 30 * i)]
        engine.add(sequences(engine, request(f"{i}", max_tokens=4), prompt))
    computed = steps_of(engine)
    engine.step()
    assert len(engine._scheduler.running) == 1
    engine.step()
    engine.step()
    others = engine._scheduler.running[1:]
    assert len(others) == 2
    assert all(each.num_computed >= 70 for each in others)
    drain(engine)
    assert sum(computed) == 70 + 3 * 30


@pytest.mark.parametrize("becomes", ["aborted", "paused", "preempted", "unsound"])
def test_who_began_with_what_is_not_published_goes_on_without_its_author(becomes: str, random_models: Path) -> None:
    settings: dict[str, object] = {"max_batch_tokens": 40, "max_num_sequences": 16}
    engine = engine_of(random_models, **settings)
    prompts = {f"{i}": [*PROMPT[:70], *range(200 + 50 * i, 250 + 50 * i)] for i in range(4)}
    for name, prompt in prompts.items():
        engine.add(sequences(engine, request(name, max_tokens=4), prompt))
    while len(engine._scheduler.running) < 4:
        engine.step()
    first = engine._scheduler.running[0]
    assert not first.is_prompt_computed
    names = frozenset({"0"})
    if becomes == "unsound":
        first.end(FinishReason.ERROR)
        engine._scheduler.release(first)
    elif becomes == "preempted":
        engine._scheduler._preempt(first)
    else:
        engine.abort(names) if becomes == "aborted" else engine.pause(names)
    engine.check_integrity()
    outcomes = drain(engine)
    engine.resume(names)
    outcomes |= drain(engine)
    assert {name for name, _ in outcomes} == set(prompts) - ({"0"} if becomes in ("aborted", "unsound") else set())
    for key, outcome in outcomes.items():
        alone = complete(engine_of(random_models, **settings), [(request(key[0], max_tokens=4), prompts[key[0]])])
        assert outcome.token_ids == alone[key].token_ids
    assert engine._store.num_free_blocks + engine._store.num_cached_blocks == engine._store.num_blocks


def test_what_is_recorded_of_every_position_waits_for_nobody(random_models: Path) -> None:
    engine = engine_of(random_models)
    recorded = request("recorded", record=RecordParams(hidden_states="all"))
    for each in (request("plain"), recorded):
        engine.add(sequences(engine, each, PROMPT))
    engine.step()
    assert len(engine._scheduler.running) == 2


def test_who_waited_gets_the_tokens_that_he_would_have_had(random_models: Path) -> None:
    asked = [(request(f"{i}", max_tokens=8), PROMPT) for i in range(4)] + [(request("other"), PROMPT[:50])]
    together = complete(engine_of(random_models), asked)
    alone = {key: each for one in asked for key, each in complete(engine_of(random_models), [one]).items()}
    assert {key: each.token_ids for key, each in together.items()} == {k: v.token_ids for k, v in alone.items()}


def test_another_prompt_does_not_wait_beside_them(random_models: Path) -> None:
    engine = engine_of(random_models)
    other, long = [*PROMPT[:40], *PROMPT[:60]], [*PROMPT[:60], *PROMPT, *PROMPT]  # less than half of it is the same
    prompts = {"first": PROMPT, "same": PROMPT, "other": other, "short": PROMPT[:9], "long": long, "near": PROMPT[:-1]}
    for name, prompt in prompts.items():
        engine.add(sequences(engine, request(name), prompt))
    engine.step()
    assert [each.request.request_id for each in engine._scheduler.running] == ["first", "other", "short", "long"]


@pytest.mark.law("Computed once")
@pytest.mark.parametrize("is_aborted", [True, False])
def test_where_the_first_one_goes_the_next_computes_it(is_aborted: bool, random_models: Path) -> None:
    engine = engine_of(random_models)
    for name in ("first", "second", "third"):
        engine.add(sequences(engine, request(name, max_tokens=4), PROMPT))
    engine.step()
    names = frozenset({"first"})
    engine.abort(names) if is_aborted else engine.pause(names)
    outcomes: dict = {}
    collect(outcomes, engine.step())
    assert [each.request.request_id for each in engine._scheduler.running] == ["second"]
    for key, outcome in drain(engine).items():
        outcomes[key] = outcome
    assert {name for name, _ in outcomes} == {"second", "third"}
    engine.resume(names)
    assert len(drain(engine)) == (0 if is_aborted else 1)


def test_a_prompt_that_is_scored_holds_nobody_up(random_models: Path) -> None:
    engine = engine_of(random_models, max_logit_rows=4)
    scored = request("scored", logprobs=LogprobParams(top=1, prompt=True), echo=True)
    for each in (scored, request("plain")):
        engine.add(sequences(engine, each, PROMPT))
    engine.step()
    assert len(engine._scheduler.running) == 2


def test_models_that_compute_it_alike_compute_it_once(random_models: Path, tmp_path: Path) -> None:
    """The base, an adapter of the last layer's end and a mix of it; another adapter goes its own way."""
    base = random_models / "llama"
    folders = {
        "end": train_nothing(base, tmp_path / "end", 1, r=4, lora_alpha=16, target_modules=LAST),
        "all": train_nothing(base, tmp_path / "all", 2, r=4, lora_alpha=16),
    }
    engine = make_engine(config(base), folders)
    end = Part(adapter="end", version="end", keeps_prefix=True)
    parts: dict[str, list[Part]] = {"base": [], "end": [end], "half": [replace(end, scale=0.5)]}
    asked = [replace(request(name, max_tokens=4), model=mixed("toy", own)) for name, own in parts.items()]
    outcomes = complete(engine, [(each, PROMPT) for each in [*asked, request("all", adapter="all", max_tokens=4)]])
    cached = {}
    for name in (*parts, "all"):
        report = outcomes[name, 0].deltas[0].prompt
        assert report is not None
        cached[name] = report.num_cached_tokens
    assert sorted(cached[name] for name in parts) == [0, 96, 96]
    assert cached["all"] == 0
