"""What an engine spent: every token once, to the flow that it was for, and all of the time of its steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from serve_app.core.ledger import Spent
from serve_app.core.request import Continued
from serve_app.core.shares import Share
from serve_app.engine.engine import Engine
from tests.engine.conftest import DEMO
from tests.engine.harness import Outcome, collect, config, make_engine, request, sequences

pytestmark = pytest.mark.slow


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make_engine(config(DEMO, max_batch_tokens=24, max_num_sequences=4))
    yield made
    made.close()


def add(engine: Engine, name: str, flow: str, length: int, *, n: int = 1, max_tokens: int = 6) -> None:
    asked = replace(request(name, n=n, max_tokens=max_tokens), share=Share(flow=flow))
    drawn = random.Random(name)
    engine.add(sequences(engine, asked, [drawn.randrange(20, 1000) for _ in range(length)]))


def told(outcomes: dict[tuple[str, int], Outcome], flow: str) -> tuple[int, int, int, int]:
    """Prompt, cached and completion tokens and nanoseconds, as clients of the flow were told."""
    deltas = [d for (name, _), each in outcomes.items() if name.startswith(flow) for d in each.deltas]
    prompts = [delta.prompt for delta in deltas if delta.prompt is not None]
    finishes = [delta.finish for delta in deltas if delta.finish is not None]
    return (
        sum(prompt.num_tokens for prompt in prompts),
        sum(prompt.num_cached_tokens for prompt in prompts),
        sum(finish.num_tokens for finish in finishes),
        sum(finish.engine_ns for finish in finishes),
    )


def spent(engine: Engine, flow: str) -> tuple[int, int, int, int]:
    found = {each.flow: each for each in engine.news(0).spent}.get(flow, Spent(flow=flow))
    return found.prompt_tokens, found.cached_tokens, found.completion_tokens, found.engine_ns


@pytest.mark.law("Exactly once")
def test_what_clients_were_told_of_is_what_was_spent_when_all_have_ended(engine: Engine) -> None:
    """Chunks, hits, several completions, more sequences than places, and a prompt alone."""
    outcomes: dict[tuple[str, int], Outcome] = {}
    for number in range(9):
        flow = "ab"[number % 2]
        add(engine, f"{flow}{number // 2}", flow, 5 + 9 * number, n=1 + number % 3, max_tokens=0 if number == 4 else 6)
        collect(outcomes, engine.step())
    while engine.has_work:
        collect(outcomes, engine.step())
    for flow in "ab":
        assert spent(engine, flow) == told(outcomes, flow)


@pytest.mark.law("Exactly once")
@pytest.mark.parametrize(("num_taken", "num_counted"), [(2, 2), (2, 4), (0, 3), (0, 9)])
def test_what_another_replica_has_counted_is_not_counted_again(
    engine: Engine, num_taken: int, num_counted: int
) -> None:
    """Tokens that were drawn there, and are not given on, are drawn again; the prompt is computed again."""
    ids = list(range(20, 40))
    engine.add(sequences(engine, request("whole", max_tokens=6), ids))
    outcomes: dict[tuple[str, int], Outcome] = {}
    while engine.has_work:
        collect(outcomes, engine.step())
    whole = outcomes["whole", 0].token_ids
    begun = Continued(token_ids=tuple(whole[:num_taken]), num_counted=num_counted)
    asked = replace(request("rest", max_tokens=6), share=Share(flow="b"), continued=(begun,))
    made = sequences(engine, asked, ids)
    for sequence in made:
        engine.go_on(sequence)
    engine.add(made)
    while engine.has_work:
        collect(outcomes, engine.step())
    assert (whole[:num_taken] + outcomes["rest", 0].token_ids) == whole
    assert (spent(engine, "b")[0], spent(engine, "b")[2]) == (0, max(0, 6 - num_counted))


@pytest.mark.law("All time is somebody's")
def test_the_time_of_all_steps_is_shared_out_to_the_nanosecond(engine: Engine) -> None:
    """Among sequences, flows and nobody: what the ledger is told and what the metrics show is one tally."""
    outcomes: dict[tuple[str, int], Outcome] = {}
    for number in range(6):
        add(engine, f"{'ab'[number % 2]}{number}", "ab"[number % 2], 30)
    while engine.has_work:
        collect(outcomes, engine.step())
    usage, news = engine.usage, engine.news(0)
    assert usage.idle_ns + sum(each.engine_ns for each in news.spent) == usage.elapsed_ns
    assert {each.flow: each.engine_ns for each in usage.flows} == {each.flow: each.engine_ns for each in news.spent}
    for flow in "ab":
        assert spent(engine, flow)[3] == told(outcomes, flow)[3] > 0
    assert sum(each.engine_ns for each in news.spent) == pytest.approx(engine.step_s * 1e9, abs=engine.num_steps)


@pytest.mark.law("All time is somebody's")
def test_what_a_step_tells_is_what_it_changed_however_many_flows_there_were(engine: Engine) -> None:
    for number in range(60):
        add(engine, f"f{number}", f"f{number}", 6, max_tokens=2)
        while engine.has_work:
            engine.step()
            assert [each.flow for each in engine.load.spent] == [f"f{number}"]
            engine.note_told()
    assert len(engine.news(0).spent) == 60
    heard = engine.news(0).until
    assert engine.news(heard).spent == ()
    add(engine, "again", "f7", 6, max_tokens=2)
    while engine.has_work:
        engine.step()
    assert [each.flow for each in engine.news(heard).spent] == ["f7"]


def test_what_an_abort_gave_up_is_in_the_load_until_that_is_told(engine: Engine) -> None:
    """Whatever is computed between the two, of this flow or of none."""
    add(engine, "a0", "a", 80)
    engine.step()
    engine.note_told()
    engine.abort(frozenset({"a0"}))
    add(engine, "b0", "b", 6)
    for _ in range(2):
        engine.step()
        found = {each.flow: each for each in engine.load.spent}
        assert found.keys() == {"a", "b"}
        assert found["a"].prompt_tokens == spent(engine, "a")[0] == 24
    engine.note_told()
    assert engine.load.spent == ()


@pytest.mark.parametrize("seed", range(6))
def test_what_is_given_up_was_spent_none_the_less(engine: Engine, seed: int) -> None:
    """Aborted while it waits, within its prompt, and while it is generated: never less than clients were told."""
    drawn, outcomes = random.Random(seed), dict[tuple[str, int], Outcome]()
    for number in range(12):
        add(engine, f"a{seed}.{number}", "a", drawn.randint(5, 80), n=drawn.randint(1, 2))
        for _ in range(drawn.randint(0, 3)):
            collect(outcomes, engine.step())
        if drawn.random() < 0.5:
            engine.abort(frozenset({f"a{seed}.{drawn.randrange(number + 1)}"}))
    while engine.has_work:
        collect(outcomes, engine.step())
    shown = sum(len(each.token_ids) for each in outcomes.values())
    prompt, cached, completion, _ = spent(engine, "a")
    assert completion == shown
    assert prompt >= told(outcomes, "a")[0]
    assert 0 <= cached <= prompt


def test_a_step_that_fails_leaves_what_was_shown_counted(engine: Engine) -> None:
    add(engine, "a0", "a", 10)
    outcomes: dict[tuple[str, int], Outcome] = {}
    for _ in range(3):
        collect(outcomes, engine.step())
    engine._settle = lambda batch: 1 // 0  # type: ignore[method-assign]
    collect(outcomes, engine.step())
    shown = sum(len(each.token_ids) for each in outcomes.values())
    assert (spent(engine, "a")[2], engine.num_failed_steps) == (shown, 1)
