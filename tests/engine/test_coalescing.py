"""Who is answered whole is sent what is said to everybody else, in fewer pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from serve_app.core.delta import Delta, Finish, FinishReason, PromptReport
from serve_app.core.errors import EngineFailed
from serve_app.core.request import LogprobParams, SamplingParams
from serve_app.engine.sampling.output import PERIOD_S, Coalescer, Output
from serve_app.engine.scheduler.sequence import Sequence
from serve_app.text.detokenizer import Detokenizer
from serve_app.text.tokenizer import TextTokenizer
from tests.engine.conftest import DEMO
from tests.engine.harness import FreeGuesses, Outcome, complete, config, make_engine, request, sequences

REPORT = PromptReport(num_tokens=2, num_cached_tokens=0)
DONE = Finish(reason=FinishReason.STOP, matched_stop=None, num_tokens=3)
HOT = SamplingParams(temperature=0.9, seed=3)
PROMPTS = [[40 + number, 50, 60] for number in range(4)]
ASKED = [
    request("greedy", max_tokens=30),
    request("sampled", max_tokens=24, sampling=HOT, n=2, logprobs=LogprobParams(top=2)),
    request("echo", max_tokens=17, echo=True, logprobs=LogprobParams(top=1, prompt=True)),
    request("one", max_tokens=1),
]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def detokenizer() -> Callable[[], Detokenizer]:
    tokenizer = TextTokenizer.load(DEMO, vocab_size=2048)
    return lambda: tokenizer.detokenizer([])


def sequence(detokenizer: Callable[[], Detokenizer], *, is_read_whole: bool) -> Sequence:
    asked = replace(request("a"), is_read_whole=is_read_whole)
    return Sequence(asked, [1, 2], sample=0, max_tokens=9, detokenizer=detokenizer())


def delta(text: str, token_id: int, **what: object) -> Delta:
    return replace(Delta(request_id="a", sample=0, text=text, token_ids=(token_id,)), **what)  # type: ignore[arg-type]


def test_the_first_goes_at_once_the_others_when_it_is_time_or_the_end(detokenizer: Callable[[], Detokenizer]) -> None:
    clock = Clock()
    coalescer, own = Coalescer(clock), sequence(detokenizer, is_read_whole=True)
    coalescer.begin()
    given = [coalescer.take(own, [delta("a", 1, prompt=REPORT)])]
    for token_id in range(2, 8):
        clock.now += 0.3 * PERIOD_S
        coalescer.begin()
        finish = DONE if token_id == 7 else None
        given.append(coalescer.take(own, [delta("x", token_id, finish=finish)]))
    assert [[each.token_ids for each in step] for step in given] == [[(1,)], [], [], [], [(2, 3, 4, 5)], [], [(6, 7)]]
    assert given[4][0].text == "xxxx"
    assert (given[0][0].prompt, given[6][0].finish) == (REPORT, DONE)


def test_all_that_is_due_goes_in_the_same_step(detokenizer: Callable[[], Detokenizer]) -> None:
    clock = Clock()
    coalescer = Coalescer(clock)
    own = [sequence(detokenizer, is_read_whole=True) for _ in range(3)]
    steps = []
    for number in range(12):
        coalescer.begin()
        steps.append([len(coalescer.take(each, [delta("x", number)])) for each in own])
        clock.now += 0.21 * PERIOD_S
    assert [sum(step) for step in steps] == [3, 0, 0, 0, 0, 3, 0, 0, 0, 0, 3, 0]


def test_what_came_before_an_error_comes_before_it(detokenizer: Callable[[], Detokenizer]) -> None:
    coalescer, own = Coalescer(lambda: 100.0), sequence(detokenizer, is_read_whole=True)
    coalescer.begin()
    coalescer.take(own, [delta("a", 1, prompt=REPORT)])
    coalescer.begin()
    assert coalescer.take(own, [delta("b", 2)]) == []
    assert coalescer.take(own, [delta("c", 3)]) == []
    lost = Delta(request_id="a", sample=0, error=EngineFailed("lost"))
    given = coalescer.take(own, [lost])
    assert [(each.text, each.error is None) for each in given] == [("bc", True), ("", False)]
    assert coalescer.take(own, []) == []


def test_a_stream_is_given_each_step(detokenizer: Callable[[], Detokenizer]) -> None:
    coalescer, own = Coalescer(lambda: 100.0), sequence(detokenizer, is_read_whole=False)
    for token_id in range(5):
        coalescer.begin()
        assert coalescer.take(own, [delta("x", token_id)]) == [delta("x", token_id)]


def outcomes(*, is_read_whole: bool, guesses: bool) -> dict[tuple[str, int], Outcome]:
    engine = make_engine(config(DEMO, max_num_sequences=8, speculation="prompt_lookup" if guesses else "none"))
    if guesses:
        engine.speculator.costs = FreeGuesses()
    asked = [replace(each, is_read_whole=is_read_whole) for each in ASKED]
    return complete(engine, list(zip(asked, PROMPTS, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("guesses", [False, True])
def test_what_is_said_is_the_same(guesses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.engine.sampling.output.PERIOD_S", 1e9)
    stepwise, whole = (outcomes(is_read_whole=each, guesses=guesses) for each in (False, True))
    assert stepwise.keys() == whole.keys()
    for name, expected in stepwise.items():
        found = whole[name]
        assert (found.text, found.token_ids, found.logprobs) == (expected.text, expected.token_ids, expected.logprobs)
        assert found.finish == expected.finish
        assert (found.deltas[0].prompt is None) is (expected.deltas[0].prompt is None) is (name[1] > 0)
    assert len(stepwise["greedy", 0].deltas) >= 10
    assert len(whole["greedy", 0].deltas) == 2
    assert len(whole["one", 0].deltas) == 1


@pytest.mark.slow
def test_a_failure_to_take_a_step_over_tells_what_came_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.engine.sampling.output.PERIOD_S", 1e9)
    engine = make_engine(config(DEMO))
    take, calls = Output._take, iter(range(100))

    def failing(output: Output, *given: object, **more: object) -> str:
        if next(calls) == 5:
            raise ValueError("a bug")
        return take(output, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Output, "_take", failing)
    asked = replace(request("a", max_tokens=30), is_read_whole=True)
    engine.add(sequences(engine, asked, PROMPTS[0]))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert sum(len(each.token_ids) for each in deltas) == 5
    assert isinstance(deltas[-1].error, EngineFailed)
