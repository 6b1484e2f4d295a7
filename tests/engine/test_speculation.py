"""Guesses change no text: whatever is guessed, rightly or not, tokens, scores and endings are those without."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from serve_app.core.delta import Finish, FinishReason, TokenLogprob
from serve_app.core.names import ModelRef
from serve_app.core.prompt import Prompt
from serve_app.core.request import DryParams, GenerationRequest, LogprobParams, RecordParams, SamplingParams
from serve_app.engine.engine import Engine
from serve_app.engine.speculation.speculator import StepCosts
from tests.engine.conftest import DEMO, DEMO_ADAPTERS
from tests.engine.harness import FreeGuesses, Outcome, complete, config, make_engine, request, sequences

pytestmark = pytest.mark.slow
TEXT = "Once upon a time there was a little girl. She had a red ball. Once upon a time there was a little"
LENGTH = 48
ADAPTER = sorted(folder.name for folder in DEMO_ADAPTERS.glob("*/") if list(folder.glob("*.safetensors")))[0]
HOT = SamplingParams(temperature=0.9, seed=7)
BIAS = tuple((token_id, 1.5) for token_id in range(60, 90))
REQUESTS = {
    "greedy": request("greedy", max_tokens=LENGTH),
    "sampled": request("sampled", max_tokens=LENGTH, sampling=HOT),
    "several": request("several", max_tokens=LENGTH, sampling=HOT, n=3),
    "narrow": request("narrow", max_tokens=LENGTH, sampling=replace(HOT, top_k=40, top_p=0.9, min_p=0.01)),
    "xtc": request("xtc", max_tokens=LENGTH, sampling=replace(HOT, xtc_probability=0.5)),
    "mirostat": request("mirostat", max_tokens=LENGTH, sampling=replace(HOT, mirostat=2, mirostat_tau=2.0)),
    "penalties": request(
        "penalties", max_tokens=LENGTH, sampling=replace(HOT, repetition_penalty=1.3, frequency_penalty=0.4)
    ),
    "window": request("window", max_tokens=LENGTH, sampling=replace(HOT, presence_penalty=0.5, penalty_window=9)),
    "dry": request("dry", max_tokens=LENGTH, sampling=replace(HOT, dry=DryParams(multiplier=0.8))),
    "bias": request("bias", max_tokens=LENGTH, sampling=replace(HOT, logit_bias=BIAS)),
    "bad words": request("bad words", max_tokens=LENGTH, sampling=replace(HOT, bad_words=((70,), (80, 90)))),
    "scored": request("scored", max_tokens=LENGTH, logprobs=LogprobParams(top=3)),
    "scored as drawn": request(
        "scored as drawn", max_tokens=LENGTH, sampling=HOT, logprobs=LogprobParams(top=2, post_sampling=True)
    ),
    "echo": request("echo", max_tokens=LENGTH, echo=True, logprobs=LogprobParams(top=1, prompt=True)),
    "adapter": request("adapter", max_tokens=LENGTH, adapter=ADAPTER),
    "stop": request("stop", max_tokens=LENGTH, stop=(" was", "zz")),
    "one": request("one", max_tokens=1),
    "two": request("two", max_tokens=2),
    "odd": request("odd", max_tokens=13),
}


@cache
def engine_of(speculation: str, *, num_blocks: int = 600) -> Engine:
    settings = config(DEMO, speculation=speculation, kv_cache_bytes=6 * 2 * (32 + 32) * 4 * 16 * num_blocks)
    engine = make_engine(settings, {ADAPTER: DEMO_ADAPTERS / ADAPTER})
    engine.speculator.costs = FreeGuesses()
    return engine


def prompt_of(engine: Engine) -> list[int]:
    return list(engine.tokenizer.encode(Prompt(parts=(TEXT,))))  # type: ignore[attr-defined]


@cache
def plain(name: str) -> dict[int, Outcome]:
    """What the request comes to without guesses, by sample."""
    return told(engine_of("none"), REQUESTS[name])


def told(engine: Engine, asked: GenerationRequest) -> dict[int, Outcome]:
    found = complete(engine, [(asked, prompt_of(engine))])
    return {sample: outcome for (_, sample), outcome in found.items()}


def with_changes(token_ids: list[int], every: int) -> tuple[int, ...]:
    """A prediction that is wrong at every so manieth token."""
    return tuple(token_id + 1 if at % every == every - 1 else token_id for at, token_id in enumerate(token_ids))


def assert_same(found: dict[int, Outcome], expected: dict[int, Outcome]) -> None:
    assert found.keys() == expected.keys()
    for sample, outcome in found.items():
        other = expected[sample]
        assert (outcome.text, outcome.token_ids) == (other.text, other.token_ids), sample
        assert bare(outcome) == bare(other)
        assert len(outcome.logprobs) == len(other.logprobs)
        for one, another in zip(outcome.logprobs, other.logprobs, strict=True):
            assert isinstance(one, TokenLogprob)
            assert isinstance(another, TokenLogprob)
            assert (one.token_id, one.text, one.offset) == (another.token_id, another.text, another.offset)
            assert one.logprob == pytest.approx(another.logprob, abs=1e-4)
        reports = [delta.prompt for delta in outcome.deltas if delta.prompt is not None]
        assert len(reports) == (1 if sample == 0 else 0)
        endings = [delta for delta in outcome.deltas if delta.finish is not None]
        assert endings == outcome.deltas[-1:]


def bare(outcome: Outcome) -> Finish:
    """The finish without what was guessed."""
    assert isinstance(outcome.finish, Finish)
    return replace(outcome.finish, predicted=None)


@pytest.mark.parametrize("name", REQUESTS)
def test_prompt_lookup_changes_nothing(name: str) -> None:
    assert_same(told(engine_of("prompt_lookup"), REQUESTS[name]), plain(name))


@pytest.mark.law("Guesses")
@pytest.mark.parametrize("every", [1000, 5, 2, 1])
@pytest.mark.parametrize("name", REQUESTS)
def test_predictions_right_and_wrong_change_nothing(name: str, every: int) -> None:
    engine, expected = engine_of("requested"), plain(name)
    asked = replace(REQUESTS[name], prediction=with_changes(expected[0].token_ids, every))
    before = engine.load
    assert_same(told(engine, asked), expected)
    if every == 1000 and len(expected[0].token_ids) > 8 and asked.n == 1:
        num_tokens = len(expected[0].token_ids)
        assert engine.num_steps - before.num_steps < num_tokens / 3  # and it is of use
        assert engine.load.num_accepted_tokens - before.num_accepted_tokens > num_tokens / 2


@pytest.mark.law("Guesses")
def test_all_of_them_in_company_and_after_preemption_are_the_same() -> None:
    engine = engine_of("prompt_lookup", num_blocks=24)
    asked = [
        (replace(one, prediction=with_changes(plain(name)[0].token_ids, 7)), prompt_of(engine))
        for name, one in REQUESTS.items()
    ]
    before = engine.num_preemptions, engine.load.num_accepted_tokens
    found = complete(engine, asked)
    assert engine.num_preemptions > before[0]
    assert engine.load.num_accepted_tokens > before[1]
    for name in REQUESTS:
        assert_same({sample: each for (own, sample), each in found.items() if own == name}, plain(name))


@pytest.mark.parametrize("place", range(2, 20, 3))
def test_an_end_token_inside_a_draft_ends_the_text_there(place: int) -> None:
    expected = plain("greedy")[0].token_ids
    end = expected[place]
    first = expected.index(end)
    engine = make_engine(config(DEMO, speculation="requested"), eos_token_ids=frozenset((end,)))
    engine.speculator.costs = FreeGuesses()
    asked = replace(REQUESTS["greedy"], prediction=tuple(expected))
    outcome = told(engine, asked)[0]
    assert outcome.token_ids == expected[: first + 1]
    assert bare(outcome).reason is FinishReason.STOP
    assert bare(outcome).matched_stop == end


@pytest.mark.parametrize("place", range(2, 20, 3))
def test_a_stop_string_inside_a_draft_ends_the_text_there(place: int) -> None:
    whole, expected = plain("greedy")[0].text, tuple(plain("greedy")[0].token_ids)
    stop = whole[place : place + 4]
    asked = request("cut", max_tokens=LENGTH, stop=(stop,), logprobs=LogprobParams(top=0))
    without = told(engine_of("none"), asked)
    found = told(engine_of("requested"), replace(asked, prediction=expected))
    assert found[0].text == whole[: whole.index(stop)]
    assert_same(found, without)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, 9, 10])
def test_a_text_ends_where_it_may_have_no_more_tokens(max_tokens: int) -> None:
    expected = plain("greedy")[0].token_ids
    asked = request("short", max_tokens=max_tokens, prediction=tuple(expected))
    found = told(engine_of("requested"), asked)[0]
    assert found.token_ids == expected[:max_tokens]
    assert bare(found).reason is FinishReason.LENGTH


def test_what_was_guessed_is_told_of_predictions_alone() -> None:
    expected = plain("greedy")[0].token_ids
    engine = engine_of("prompt_lookup")
    before = engine.load
    finish = told(engine, replace(REQUESTS["greedy"], prediction=with_changes(expected, 5)))[0].finish
    assert isinstance(finish, Finish)
    assert finish.predicted is not None
    drafted = engine.load.num_drafted_tokens - before.num_drafted_tokens
    accepted = engine.load.num_accepted_tokens - before.num_accepted_tokens
    assert finish.predicted == (accepted, drafted - accepted)
    assert accepted > 0
    assert drafted > accepted
    finish = told(engine, REQUESTS["greedy"])[0].finish
    assert isinstance(finish, Finish)
    assert finish.predicted is None


def test_a_step_gives_one_delta_for_all_that_it_drew() -> None:
    engine = engine_of("requested")
    asked = replace(REQUESTS["scored"], prediction=tuple(plain("scored")[0].token_ids))
    engine.add(sequences(engine, asked, prompt_of(engine)))
    counts = []
    while engine.has_work:
        deltas = engine.step()
        engine.check_integrity()
        assert len(deltas) <= 1
        counts += [len(delta.token_ids) for delta in deltas]
    assert max(counts) == engine.config.max_draft_tokens + 1
    assert sum(counts) == LENGTH


@pytest.mark.parametrize(("speculation", "predicts"), [("none", True), ("requested", False)])
def test_who_did_not_ask_is_not_guessed_for(speculation: str, predicts: bool) -> None:
    engine = engine_of(speculation)
    before = engine.load.num_drafted_tokens
    prediction = tuple(plain("greedy")[0].token_ids) if predicts else ()
    assert_same(told(engine, replace(REQUESTS["greedy"], prediction=prediction)), plain("greedy"))
    assert engine.load.num_drafted_tokens == before


def test_of_whom_every_position_is_recorded_nothing_is_guessed() -> None:
    engine = engine_of("prompt_lookup")
    before = engine.load.num_drafted_tokens
    asked = replace(
        REQUESTS["greedy"], prediction=tuple(plain("greedy")[0].token_ids), record=RecordParams(hidden_states="all")
    )
    assert told(engine, asked)[0].token_ids == plain("greedy")[0].token_ids
    assert engine.load.num_drafted_tokens == before


class Priced(StepCosts):
    """Guesses of a price that no clock decides, in steps."""

    def __init__(self, price: float) -> None:
        super().__init__()
        self._price = price

    def plain_s(self, num_sequences: int) -> float | None:
        return 1.0

    def extra_s(self, num_sequences: int, num_guesses: int) -> float:
        return num_guesses * self._price


@pytest.mark.law("Guesses")
@pytest.mark.parametrize("name", ["greedy", "sampled", "hot", "xtc"])
@pytest.mark.parametrize("every", [1, 2])
def test_guesses_that_miss_take_no_more_than_they_give(name: str, every: int) -> None:
    """In the measure of what steps and guesses cost, however wrong the client is."""
    price = 0.1
    asked = replace(REQUESTS["sampled"], sampling=replace(HOT, temperature=2.0)) if name == "hot" else REQUESTS[name]
    expected = told(engine_of("none"), asked)
    engine = make_engine(config(DEMO, speculation="prompt_lookup"))
    engine.speculator.costs = Priced(price)
    spent = 0.0
    for _ in range(4):
        wrong = with_changes(expected[0].token_ids, every)
        assert_same(told(engine, replace(asked, prediction=wrong)), expected)
        spent += len(expected[0].token_ids)
    assert engine.num_steps + price * engine.load.num_drafted_tokens <= (spent + 4) / 0.97


def test_nothing_is_guessed_where_a_guess_costs_as_much_as_a_sequence() -> None:
    engine = make_engine(config(DEMO, speculation="prompt_lookup"))
    engine.speculator.costs = Priced(1.0)
    assert_same(told(engine, replace(REQUESTS["greedy"], prediction=with_changes(plain("greedy")[0].token_ids, 5))),
                plain("greedy"))  # fmt: skip
    assert engine.load.num_drafted_tokens == 0


def test_nobody_waits_much_longer_for_anothers_guesses() -> None:
    engine = make_engine(config(DEMO, speculation="requested"))
    engine.speculator.costs = Priced(0.04)
    asked = [replace(REQUESTS["greedy"], prediction=tuple(plain("greedy")[0].token_ids)), REQUESTS["sampled"]]
    for one in asked:
        engine.add(sequences(engine, one, prompt_of(engine)))
    most = 0
    while engine.has_work:
        before, num_running = engine.load.num_drafted_tokens, engine.load.num_running
        engine.step()
        if num_running == 2:
            most = max(most, engine.load.num_drafted_tokens - before)
    assert most == 2


def test_guesses_cost_no_other_sequence_its_blocks() -> None:
    """Where blocks are short a draft gives way: nobody is preempted for what may never be drawn."""
    engines = [engine_of(mode, num_blocks=14) for mode in ("none", "prompt_lookup")]
    asked = [replace(REQUESTS[name], n=1) for name in ("greedy", "sampled", "narrow", "scored")]
    found = [complete(engine, [(one, prompt_of(engine)) for one in asked]) for engine in engines]
    assert {name: each.token_ids for name, each in found[0].items()} == {
        name: each.token_ids for name, each in found[1].items()
    }
    assert all(engine.load.num_free_blocks == engine.load.num_blocks for engine in engines)


def test_models_are_told_apart_by_nothing_that_was_guessed() -> None:
    """A draft's keys and values are overwritten before anybody finds them: a later hit computes the same text."""
    engine = engine_of("prompt_lookup")
    wrong = tuple(token_id + 1 for token_id in plain("greedy")[0].token_ids)
    first = told(engine, replace(REQUESTS["greedy"], prediction=wrong))[0]
    longer = prompt_of(engine) + first.token_ids[:-1]
    asked = request("after", max_tokens=8)
    expected = complete(engine_of("none"), [(asked, longer)])["after", 0].token_ids
    assert complete(engine, [(asked, longer)])["after", 0].token_ids == expected
    assert asked.model == ModelRef(base="toy", adapter=None, version="")


class Quick(Priced):
    """Steps that are over before anything could be looked for."""

    def plain_s(self, num_sequences: int) -> float | None:
        return 0.0001


def test_nothing_is_looked_for_where_looking_takes_longer_than_a_few_hundredths_of_a_step() -> None:
    engine = make_engine(config(DEMO, speculation="prompt_lookup"))
    engine.speculator.costs = Quick(0.0)
    assert_same(told(engine, REQUESTS["greedy"]), plain("greedy"))
    assert engine.load.num_drafted_tokens == 0
    assert not engine.speculator._guessers
