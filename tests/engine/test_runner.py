"""Steps that are launched before the last one has landed: the texts are those of steps one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serve_app.core.request import LogprobParams, SamplingParams
from serve_app.engine.decoder.memory import HostCopy
from serve_app.engine.engine import Engine
from serve_app.engine.sampling.sampler import Sampler
from tests.engine.conftest import DEMO
from tests.engine.gathered import GatheringRunner
from tests.engine.harness import Outcome, collect, complete, config, drain, make_engine, request, sequences
from tests.engine.test_graphs import Recorded

pytestmark = pytest.mark.slow

PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.3)


class Deferred(HostCopy):
    """A copy of a device that is not done before it is waited for. num_flying: copies that nobody waited for yet"""

    most_flying = num_flying = 0

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._kept = tensor, tensor.clone()
        self._has_landed = False
        Deferred.num_flying += 1
        Deferred.most_flying = max(Deferred.most_flying, Deferred.num_flying)

    def wait(self) -> Tensor:
        if not self._has_landed:
            Deferred.num_flying -= 1
            self._has_landed = True
        return self._kept


def engines(*, records: bool = False, **changes: object) -> tuple[Engine, Engine]:
    """One that computes a step after the other, and one that runs ahead, as on a device."""
    settings = config(DEMO, kernels="torch", **changes)
    plain, own = (make_engine(settings, eos_token_ids=frozenset(), runner=GatheringRunner) for _ in range(2))
    if records:
        own._runner.record_steps(Recorded(), num_places=settings.max_num_sequences)
    own._verifier.sampler = Sampler(own.model.eos_token_ids, land=Deferred)
    own._steps.runs_ahead = True
    Deferred.num_flying = Deferred.most_flying = 0
    return plain, own


def texts(outcomes: dict[tuple[str, int], Outcome]) -> dict[tuple[str, int], tuple[object, ...]]:
    return {
        name: (each.token_ids, each.text, getattr(each.finish, "reason", None), getattr(each.finish, "num_tokens", 0))
        for name, each in outcomes.items()
    }


def wanted(count: int, *, greedy: bool = False) -> list[tuple[object, list[int]]]:
    found = []
    for number in range(count):
        sampling = SamplingParams(
            seed=number, temperature=0.0 if greedy else 0.8 * (number % 3), top_k=20 * (number % 2)
        )
        logprobs = LogprobParams(top=1) if number % 4 == 3 else None
        one = request(f"{number}", max_tokens=6 + 5 * (number % 5), sampling=sampling, logprobs=logprobs)
        found.append((one, [40 + number] * (1 + 7 * (number % 4))))
    return found


@pytest.mark.parametrize("records", [False, True])
def test_texts_are_those_of_one_step_after_the_other(records: bool) -> None:
    plain, own = engines(records=records)
    expected, found = complete(plain, wanted(8)), complete(own, wanted(8))  # type: ignore[arg-type]
    assert texts(found) == texts(expected)
    assert [len(each.logprobs) for each in found.values()] == [len(each.logprobs) for each in expected.values()]
    assert own._steps.num_overlapped > 10
    assert Deferred.most_flying == 2, "one step is computed, and one is launched behind it"
    assert Deferred.num_flying == 0
    assert own._store.num_free_blocks + own._store.num_cached_blocks == own._store.num_blocks


def stop_of(engine: Engine, prompt: list[int], *, after: int) -> str:
    """A text that a greedy completion comes upon behind so many tokens, and not before."""
    outcome = complete(engine, [(request("probe", max_tokens=after + 8), prompt)])["probe", 0]
    for length in range(1, 8):
        found = outcome.text[after : after + length]
        if found and outcome.text.index(found) == after:
            return found
    pytest.fail("the text repeats itself")


@pytest.mark.parametrize("records", [False, True])
def test_a_stop_that_is_known_a_step_late_drops_what_was_computed_behind_it(records: bool) -> None:
    plain, own = engines(records=records)
    prompt = list(b"The weather was")
    stop = stop_of(plain, prompt, after=5)
    asked = [
        (request("stops", max_tokens=30, stop=(stop,)), prompt),
        (request("goes on", max_tokens=30), list(b"Once upon a")),
        (request("again", max_tokens=25), list(b"It is")),
    ]
    expected, found = complete(plain, asked), complete(own, asked)
    assert texts(found) == texts(expected)
    assert found["stops", 0].finish.matched_stop == stop  # type: ignore[attr-defined]
    assert own._steps.num_dropped == 1
    again = [(request("prefix", max_tokens=12), [*prompt, *found["stops", 0].token_ids])]
    assert texts(complete(own, again)) == texts(complete(plain, again)), "what is cached of it is sound"


def test_who_comes_or_goes_meanwhile_is_served_as_ever() -> None:
    plain, own = engines()
    asked = wanted(6, greedy=True)
    told = []
    for engine in (plain, own):
        outcomes: dict[tuple[str, int], Outcome] = {}
        for one, prompt in asked[:3]:
            engine.add(sequences(engine, one, prompt))  # type: ignore[arg-type]
        for number in range(400):
            if not engine.has_work:
                break
            if number == 4:
                engine.pause(frozenset({"1"}))
            if number == 6:
                for one, prompt in asked[3:]:
                    engine.add(sequences(engine, one, prompt))  # type: ignore[arg-type]
            if number == 8:
                engine.abort(frozenset({"2"}))
            if number == 9:
                engine.resume(frozenset({"1"}))
            collect(outcomes, engine.step())
            engine.check_integrity()
        outcomes.pop(("2", 0), None)
        told.append(texts(outcomes))
    assert told[0] == told[1]
    assert len(told[0]) == 5
    assert own._steps.num_overlapped > 0


def test_whoever_looks_at_tokens_makes_all_wait() -> None:
    plain, own = engines()
    asked = [(request("seen", max_tokens=8, sampling=PENALISED), [41] * 5), (request("free", max_tokens=8), [42] * 5)]
    assert texts(complete(own, asked)) == texts(complete(plain, asked))
    assert own._steps.num_overlapped == 0


def test_where_blocks_run_out_sequences_are_preempted_as_ever() -> None:
    block = engines()[0]._store.bytes_per_block
    plain, own = engines(kv_cache_bytes=12 * block, max_model_len=160, prefix_cache=False)
    asked = [(request(f"{number}", max_tokens=70), [40 + number] * 20) for number in range(4)]
    assert texts(complete(own, asked)) == texts(complete(plain, asked))
    assert own.num_preemptions > 0
    assert own._steps.num_overlapped > 0


def test_a_row_that_was_open_takes_its_step_again() -> None:
    """What the device went on with is not what was drawn: the row's next token is computed anew."""
    plain, own = engines()
    flat = SamplingParams(seed=3, temperature=1.9, top_p=0.9999)
    asked = [(request("open", max_tokens=24, sampling=flat), [41] * 5), (request("free", max_tokens=24), [42] * 5)]
    assert own.model.vocab_size > 256
    assert texts(complete(own, asked)) == texts(complete(plain, asked))
    assert own._steps.num_overlapped > 0


def test_what_is_given_up_leaves_nothing_in_the_air() -> None:
    _, own = engines()
    for one, prompt in wanted(3):
        own.add(sequences(own, one, prompt))  # type: ignore[arg-type]
    for _ in range(4):
        own.step()
    assert own._steps.is_ahead
    own.abort(frozenset("012"))
    assert drain(own) == {}
    own.check_integrity()
    assert not own.has_work


def test_on_a_cpu_nothing_runs_ahead() -> None:
    assert not make_engine(config(DEMO))._steps.runs_ahead
    assert torch.device("cpu") == make_engine(config(DEMO)).model.device
