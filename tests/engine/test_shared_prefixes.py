"""What others have computed of a prompt is there at once, and looks for it are spread over steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.request import GenerationRequest, SamplingParams
from serve_app.engine.engine import Engine
from serve_app.engine.scheduler.sequence import Sequence
from tests.engine.conftest import DEMO
from tests.engine.harness import (
    Outcome,
    collect,
    complete,
    config,
    drain,
    make_engine,
    request,
    sequences,
)

pytestmark = pytest.mark.slow

MAX_LOOKED_FOR = 2
"""40 tokens a step allow 640 to be looked for: a second prompt of 400 may still begin, a third may not."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make_engine(config(DEMO))
    yield made
    made.close()


def prompt(seed: int, length: int = 100) -> list[int]:
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


@pytest.mark.law("Bounded work")
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


LONG = 900
FOUND = LONG // 16 * 16


def add(engine: Engine, asked: GenerationRequest, prompt_ids: list[int]) -> list[Sequence]:
    made = sequences(engine, asked, prompt_ids)
    engine.add(made)
    return made


def prepared(engine: Engine, whence: str) -> Sequence:
    """One that is about to get a long prefix: from the cache, from another that goes on, or from its first sibling."""
    asked = request("long", max_tokens=8, n=2 if whence == "sibling" else 1, sampling=SamplingParams(seed=5))
    if whence == "sibling":
        leader, sibling = add(engine, asked, prompt(4, LONG))
        while not leader.num_generated:
            engine.step()
        return sibling
    (owner,) = add(engine, request("owner", max_tokens=1 if whence == "cached" else 100), prompt(4, LONG))
    while not owner.num_generated:
        engine.step()
    return add(engine, asked, prompt(4, LONG))[0]


@pytest.mark.law("Bounded work")
@pytest.mark.parametrize("whence", ["cached", "running", "sibling"])
def test_a_long_prefix_is_shared_and_its_neighbour_gets_a_token_in_every_step(whence: str) -> None:
    engine = make_engine(config(DEMO), eos_token_ids=frozenset())
    stream = add(engine, request("stream", max_tokens=200), prompt(0, 5))[0]
    engine.step()
    long = prepared(engine, whence)
    num_held, outcomes = engine._store._ledger.num_held, dict[tuple[str, int], Outcome]()
    num_new = FOUND // 16 if whence == "cached" else 0
    while not long.num_generated:
        num_drawn = stream.num_generated
        collect(outcomes, engine.step())
        engine.check_integrity()
        assert stream.num_generated == num_drawn + 1
        assert engine._store._ledger.num_held <= num_held + num_new + 4, "a block or two of each sequence"
    collect(outcomes, [delta for outcome in drain(engine).values() for delta in outcome.deltas])
    plain = make_engine(config(DEMO, prefix_cache=False), eos_token_ids=frozenset())
    alone = complete(plain, [(long.request, prompt(4, LONG))])
    assert outcomes["long", long.sample].token_ids == alone["long", long.sample].token_ids
    assert outcomes["long", long.sample].text == alone["long", long.sample].text


@cache
def small_engine(num_blocks: int) -> Engine:
    """Of small steps, and too few blocks for all."""
    bytes_per_block = 6 * 2 * (32 + 32) * 4 * 16
    sizes = {"max_batch_tokens": 8, "max_num_sequences": 5, "kv_cache_bytes": bytes_per_block * num_blocks}
    return make_engine(config(DEMO, **sizes))


@cache
def plain_engine() -> Engine:
    return make_engine(config(DEMO, prefix_cache=False))


def random_request(generator: random.Random, name: str) -> tuple[GenerationRequest, list[int]]:
    """Most of them begin with a long part of one text."""
    own = prompt(generator.getrandbits(30), generator.randrange(1, 20))
    sampling = SamplingParams(temperature=generator.choice([0.0, 1.0]), seed=generator.getrandbits(60))
    asked = request(
        name, max_tokens=generator.choice([1, 6, 20]), n=generator.choice([1, 1, 3]), sampling=sampling
    )  # fmt: skip
    return asked, [*prompt(7, 300)[: generator.randrange(100, 300)], *own]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.sampled_from([30, 48, 120]))
def test_whoever_is_ended_or_sent_back_in_the_middle_of_it_the_others_texts_stay_the_same(
    seed: int, num_blocks: int
) -> None:
    engine, generator = small_engine(num_blocks), random.Random(seed)
    asked = dict[str, tuple[GenerationRequest, list[int]]]()
    outcomes: dict[tuple[str, int], Outcome] = {}
    aborted: set[str] = set()
    to_come = [f"r{number}" for number in range(8)]
    for _ in range(4000):
        chance = generator.random()
        if to_come and chance < 0.1:
            name = to_come.pop()
            asked[name] = random_request(generator, name)
            engine.add(sequences(engine, *asked[name]))
        elif asked and chance < 0.11:
            aborted.add(generator.choice(list(asked)))
            engine.abort(frozenset(aborted))
        elif asked and chance < 0.14:
            engine.pause(frozenset([generator.choice(list(asked))]))
        elif chance < 0.2 or not engine.has_work:
            engine.resume(frozenset(asked))
        collect(outcomes, engine.step())
        engine.check_integrity()
        if not to_come and not engine.has_work and not engine.load.num_waiting:
            break
    assert not engine.has_work
    assert engine.load.num_free_blocks == engine.load.num_blocks
    for name in asked.keys() - aborted:
        alone = complete(plain_engine(), [asked[name]])
        for sample in range(asked[name][0].n):
            assert outcomes[name, sample].token_ids == alone[name, sample].token_ids, f"{name}#{sample}"
            assert outcomes[name, sample].text == alone[name, sample].text
