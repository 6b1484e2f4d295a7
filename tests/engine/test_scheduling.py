"""Neighbours on one engine: nobody's prompt, adapter, size or failure is another one's wait or error."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace

import pytest
import torch

from serve_app.core.delta import Delta, FinishReason
from serve_app.core.errors import EngineFailed
from serve_app.engine.engine import Engine
from serve_app.engine.kv.storage import Storage
from serve_app.engine.scheduler.planner import Pace
from tests.engine.conftest import DEMO, DEMO_ADAPTERS
from tests.engine.harness import collect, complete, config, drain, make_engine, request, sequences

pytestmark = pytest.mark.slow

BLOCK_BYTES = 6 * 2 * (32 + 32) * 4 * 16


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make_small()
    yield made
    made.close()


@pytest.fixture
def impatient() -> Iterator[Engine]:
    """Lets nobody overtake a sequence that waits."""
    made = make_small(max_bypass_s=0.0)
    yield made
    made.close()


def make_small(**changes: object) -> Engine:
    return make_engine(
        config(
            DEMO,
            max_batch_tokens=64,
            max_adapters=1,
            kv_cache_bytes=200 * BLOCK_BYTES,
            prefix_cache=False,
            **changes,
        ),
        {name: DEMO_ADAPTERS / name for name in ("pirate", "shout")},
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, 1000, (length,), generator=generator).tolist()


def first_token_steps(engine: Engine, names: set[str], *, max_steps: int = 400) -> dict[str, int]:
    """In which step each request got its first token."""
    found: dict[str, int] = {}
    for number in range(1, max_steps):
        for delta in engine.step():
            if delta.token_ids:
                found.setdefault(delta.request_id, number)
        if names <= found.keys():
            return found
    raise AssertionError(f"no token for {names - found.keys()} in {max_steps} steps")


@pytest.mark.law("Nobody is held up")
def test_a_short_prompt_does_not_wait_for_a_long_one_before_it(engine: Engine) -> None:
    engine.add(sequences(engine, request("long", max_tokens=1), prompt(1500)))
    engine.step()
    engine.add(sequences(engine, request("short", max_tokens=1), prompt(16)))
    steps = first_token_steps(engine, {"short", "long"})
    assert steps["short"] <= 1
    assert steps["long"] <= 1500 / 64 + 3
    drain(engine)


def test_a_long_prompt_gets_on_however_many_short_ones_come(engine: Engine) -> None:
    engine.add(sequences(engine, request("long", max_tokens=1), prompt(600)))
    for number in range(60):
        engine.add(sequences(engine, request(f"s{number}", max_tokens=1), prompt(60, number)))
        if any(delta.request_id == "long" for delta in engine.step()):
            break
    assert number <= 2 * 600 / 64 + 2
    drain(engine)


def test_prompt_work_beside_decoding_sequences_keeps_to_the_pace(engine: Engine) -> None:
    engine._scheduler.pace = Pace(2.0)
    for number in range(4):
        engine.add(sequences(engine, request(f"d{number}", max_tokens=200), prompt(5, number)))
    while len([each for each in engine._scheduler.running if each.num_generated]) < 4:
        engine.step()
    for _ in range(10):
        engine._scheduler.pace.note(4, 0, 0.010)
        engine._scheduler.pace.note(4, 20, 0.030)  # 20 tokens took twice what is allowed beside these
    engine.add(sequences(engine, request("long", max_tokens=1), prompt(1000)))
    batch = engine._scheduler.schedule()
    assert batch.num_decoding == 4
    assert 0 < batch.num_prompt_tokens <= 20
    engine.abort(frozenset(["long", *(f"d{number}" for number in range(4))]))
    engine.check_integrity()


@pytest.mark.law("Nobody is held up")
def test_a_request_that_waits_for_an_adapters_slot_holds_nobody_up(engine: Engine) -> None:
    engine.add(sequences(engine, request("resident", max_tokens=60, adapter="pirate"), prompt(5)))
    engine.step()
    engine.add(sequences(engine, request("starved", max_tokens=1, adapter="shout"), prompt(5)))
    engine.add(sequences(engine, request("base", max_tokens=1), prompt(5)))
    engine.add(sequences(engine, request("same", max_tokens=1, adapter="pirate"), prompt(5)))
    steps = first_token_steps(engine, {"base", "same"})
    assert max(steps["base"], steps["same"]) <= 2
    outcomes = drain(engine)
    assert outcomes["starved", 0].finish is not None


def test_an_adapter_that_waited_long_enough_gets_the_next_slot(impatient: Engine) -> None:
    """A stream of requests to the resident adapter would keep it for ever."""
    impatient.add(sequences(impatient, request("r0", max_tokens=8, adapter="pirate"), prompt(5)))
    impatient.step()
    impatient.add(sequences(impatient, request("starved", max_tokens=1, adapter="shout"), prompt(5)))
    seen: list[Delta] = []
    for number in range(1, 200):
        impatient.add(sequences(impatient, request(f"r{number}", max_tokens=8, adapter="pirate"), prompt(5, number)))
        seen += impatient.step()
        if any(delta.request_id == "starved" for delta in seen):
            break
    assert number <= 12
    drain(impatient, max_steps=20000)


def test_a_request_that_waits_for_blocks_holds_up_no_smaller_one_and_is_served(impatient: Engine) -> None:
    impatient.add(sequences(impatient, request("first", max_tokens=40), prompt(1600)))
    impatient.step()
    impatient.add(sequences(impatient, request("large", max_tokens=1), prompt(1900)))
    for number in range(12):
        impatient.add(sequences(impatient, request(f"s{number}", max_tokens=30), prompt(300, number)))
    outcomes = drain(impatient)
    order = [name for (name, _), outcome in outcomes.items() if outcome.finish is not None]
    assert set(order) == {"first", "large", *(f"s{number}" for number in range(12))}


@pytest.mark.law("Isolation")
@pytest.mark.parametrize("end", ["abort", "pause"])
def test_numbers_that_are_none_reach_nobody_after_their_owner_is_gone(engine: Engine, end: str) -> None:
    expected = complete(engine, [(request("alone", max_tokens=20), prompt(30))])["alone", 0].token_ids
    engine.add(sequences(engine, request("bad", max_tokens=50), prompt(40)))
    engine.add(sequences(engine, request("bystander", max_tokens=50), prompt(50, 1)))
    engine.step()
    bad = next(each for each in engine._scheduler.running if each.request.request_id == "bad")
    assert bad.place.holding is not None
    storage = engine._store.storage
    places = torch.tensor(list(storage.places(bad.place.holding, 0, 41)))
    for layer, shape in enumerate(engine.model.shape.layers):
        storage.write(layer, places, torch.full((41, shape.heads, shape.key_dim), torch.nan),
                      torch.full((41, shape.heads, shape.value_dim), torch.nan))  # fmt: skip
    bad.num_computed = min(bad.num_computed, bad.prompt_length - 1)  # nothing sound followed from it
    getattr(engine, end)(frozenset(["bad"]))
    for number in range(3):
        found = complete(engine, [(request(f"after{number}", max_tokens=20), prompt(30))])
        assert found[f"after{number}", 0].token_ids == expected
    engine.abort(frozenset(["bad"]))


def test_a_paused_request_goes_on_where_it_was(engine: Engine) -> None:
    expected = complete(engine, [(request("alone", max_tokens=30), prompt(30))])["alone", 0]
    engine.add(sequences(engine, request("stopped", max_tokens=30), prompt(30)))
    outcomes: dict = {}
    for _ in range(8):
        collect(outcomes, engine.step())
    engine.pause(frozenset(["stopped"]))
    engine.check_integrity()
    assert not engine.has_work
    assert engine.load.num_free_blocks == engine.load.num_blocks
    assert engine.step() == []
    engine.resume(frozenset(["stopped"]))
    while engine.has_work:
        collect(outcomes, engine.step())
    assert outcomes["stopped", 0].text == expected.text
    assert outcomes["stopped", 0].token_ids == expected.token_ids


def test_what_ended_in_a_step_is_told_even_where_another_cannot_be_settled(engine: Engine) -> None:
    for name in ("broken", "whole"):
        engine.add(sequences(engine, request(name, max_tokens=2), prompt(10)))
    engine.step()
    broken = next(each for each in engine._scheduler.running if each.request.request_id == "broken")
    (sibling,) = sequences(engine, request("broken", max_tokens=2), prompt(10))
    sibling.request = replace(sibling.request, model=None)  # type: ignore[arg-type]  # what cannot be started
    sibling.sample = 1
    broken.forks = [sibling]
    deltas = engine.step()
    told = {delta.request_id: delta for delta in deltas}
    assert told["whole"].finish is not None
    assert told["whole"].finish.reason in {FinishReason.LENGTH, FinishReason.STOP}
    of_broken = {delta.sample: delta for delta in deltas if delta.request_id == "broken"}
    assert of_broken[0].finish is not None
    assert isinstance(of_broken[1].error, EngineFailed)
    engine.check_integrity()
    assert not engine.has_work


class FailingOnce:
    """A storage that cannot give back what the first one leaves that ends."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.num_failures = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)

    def discard(self, blocks: Items[int]) -> None:
        if not self.num_failures:
            self.num_failures = 1
            raise MemoryError("the kernel refuses")
        self._storage.discard(blocks)


def test_a_sequence_that_cannot_be_let_go_ends_once_and_its_neighbours_as_ever(engine: Engine) -> None:
    alone = complete(engine, [(request("whole", max_tokens=2), prompt(20))])["whole", 0]
    engine._store.clear()
    storage = FailingOnce(engine._store.storage)
    engine._store.storage = storage  # type: ignore[assignment]
    for name in ("broken", "whole"):
        engine.add(sequences(engine, request(name, max_tokens=2), prompt(20)))
    outcomes = drain(engine)
    assert storage.num_failures == 1
    for name in ("broken", "whole"):
        assert [delta.finish is not None for delta in outcomes[name, 0].deltas].count(True) == 1
        assert not any(delta.error for delta in outcomes[name, 0].deltas)
        assert outcomes[name, 0].token_ids == alone.token_ids
    assert engine.num_failed_steps == 0
    assert complete(engine, [(request("next", max_tokens=2), prompt(20))])["next", 0].token_ids == alone.token_ids
    engine.check_integrity()


def test_a_sequence_whose_text_cannot_be_made_fails_alone(engine: Engine) -> None:
    for name in ("broken", "whole"):
        engine.add(sequences(engine, request(name, max_tokens=6), prompt(10)))
    engine.step()
    broken = next(each for each in engine._scheduler.running if each.request.request_id == "broken")
    broken.shown.detokenizer = None  # type: ignore[assignment]
    outcomes = drain(engine)
    assert isinstance(outcomes["broken", 0].deltas[-1].error, EngineFailed)
    assert outcomes["whole", 0].finish is not None
    engine.check_integrity()
