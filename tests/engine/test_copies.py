"""Copies of computed prompts, and looks for them, are spread over steps, so that nobody waits for many at once."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from serve_app.core.request import SamplingParams
from serve_app.engine.engine import Engine
from tests.engine.conftest import DEMO
from tests.engine.harness import Outcome, collect, complete, config, make_engine, request, sequences

pytestmark = pytest.mark.slow

PROMPT_TOKENS = 100
MAX_BEGINNING = 2
"""40 tokens a step allow 160 to be copied: a second copy of 99 may still begin, a third may not."""
MAX_LOOKED_FOR = 2
"""40 tokens a step allow 640 to be looked for: a second prompt of 400 may still begin, a third may not."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make_engine(config(DEMO))
    yield made
    made.close()


def prompt(seed: int, length: int = PROMPT_TOKENS) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(20, 1000) for _ in range(length)]


def drain_counting(engine: Engine) -> tuple[dict[tuple[str, int], Outcome], list[int]]:
    """What came of everything, and by how many more sequences ran after each step."""
    outcomes: dict[tuple[str, int], Outcome] = {}
    more: list[int] = []
    while engine.has_work:
        before = engine.load.num_running
        collect(outcomes, engine.step())
        engine.check_integrity()
        more.append(engine.load.num_running - before)
    return outcomes, more


def test_many_completions_of_one_prompt_begin_a_few_per_step(engine: Engine) -> None:
    hot = SamplingParams(temperature=1.0, seed=3)
    alone = complete(make_engine(engine.config), [(request("many", n=7, sampling=hot), prompt(1))])
    engine.add(sequences(engine, request("stream", max_tokens=40), prompt(0, 5)))
    engine.step()
    engine.add(sequences(engine, request("many", n=7, sampling=hot), prompt(1)))
    outcomes, more = drain_counting(engine)
    assert max(more) <= MAX_BEGINNING
    for key, outcome in alone.items():
        assert outcomes[key].token_ids == outcome.token_ids


def test_many_hits_of_one_prefix_begin_a_few_per_step(engine: Engine) -> None:
    expected = complete(engine, [(request("first"), prompt(2))])["first", 0]
    engine.add(sequences(engine, request("stream", max_tokens=40), prompt(0, 5)))
    engine.step()
    for number in range(7):
        engine.add(sequences(engine, request(f"again-{number}"), prompt(2)))
    outcomes, more = drain_counting(engine)
    assert max(more) <= MAX_BEGINNING
    assert all(outcomes[f"again-{number}", 0].token_ids == expected.token_ids for number in range(7))
    assert engine.load.num_prefix_hit_tokens == 7 * (PROMPT_TOKENS // 16 * 16)


def test_many_long_prompts_are_looked_for_a_few_per_step(engine: Engine) -> None:
    engine.add(sequences(engine, request("stream", max_tokens=40), prompt(0, 5)))
    engine.step()
    for number in range(6):
        engine.add(sequences(engine, request(f"long-{number}", max_tokens=1), prompt(10 + number, 400)))
    outcomes, more = drain_counting(engine)
    assert max(more) == MAX_LOOKED_FOR
    assert len(outcomes) == 7


def test_completions_that_have_not_begun_when_the_first_ends_still_come(engine: Engine) -> None:
    outcomes = complete(engine, [(request("many", n=12, max_tokens=1), prompt(3))])
    assert len(outcomes) == 12
    assert len({tuple(outcome.token_ids) for outcome in outcomes.values()}) == 1
