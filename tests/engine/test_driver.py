"""The driver survives whatever fails in its thread, and every request that it concerns ends with an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from serve_app.core.delta import Delta, Finish, FinishReason, Load
from serve_app.core.errors import EngineFailed
from serve_app.core.ledger import Spent
from serve_app.core.log_context import MAX_NAMED
from serve_app.core.request import GenerationRequest
from serve_app.engine.driver import MAX_FAILURES_IN_A_ROW, SILENCE_S, STALL_S, Driver, OpenSequences
from serve_app.engine.scheduler.sequence import Sequence
from serve_app.text.tokenizer import TextTokenizer
from tests.engine.conftest import DEMO
from tests.engine.harness import request

pytestmark = pytest.mark.slow

DONE = Finish(reason=FinishReason.STOP, matched_stop=None, num_tokens=1)


class FakeEngine:
    """Ends every sequence in the step after it came; raises what it is told to, where it is told to.

    failures: of a method by name, how many of its next calls raise
    holds:    sequences are computed but never end
    forgets:  sequences are gone without an ending
    reports_failures: every step counts itself as failed
    spends:   every step spends something for a flow, of which the load says until that was told
    """

    def __init__(self) -> None:
        self.failures: dict[str, int] = {}
        self.calls: list[str] = []
        self.num_failed_steps = 0
        self.is_stalled = False
        self.num_resets = 0
        self.holds = False
        self.forgets = False
        self.reports_failures = False
        self.spends = False
        self.num_spent = self.num_told = 0
        self.gate = threading.Event()
        self.gate.set()
        self._running: dict[str, list[Sequence]] = {}
        self._paused: set[str] = set()

    @property
    def has_work(self) -> bool:
        return bool(self._running.keys() - self._paused)

    @property
    def load(self) -> Load:
        spent = (Spent(flow="a", engine_ns=self.num_spent),) if self.num_spent > self.num_told else ()
        return Load(num_running=len(self._running), num_blocks=7, spent=spent)

    def add(self, sequences: Items[Sequence]) -> None:
        self._enter("add")
        self._running[sequences[0].request.request_id] = list(sequences)

    def abort(self, request_ids: frozenset[str]) -> None:
        self._enter("abort")
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def pause(self, request_ids: frozenset[str]) -> None:
        self._enter("pause")
        self._paused |= request_ids

    def resume(self, request_ids: frozenset[str]) -> None:
        self._enter("resume")
        self._paused -= request_ids

    def check(self) -> None:
        self._enter("check")

    def step(self) -> list[Delta]:
        self.gate.wait()
        self._enter("step")
        if self.forgets:
            self._running.clear()
        if self.reports_failures:
            self.num_failed_steps += 1
        self.num_spent += self.spends
        if self.holds:
            return []
        ended = {id_: found for id_, found in self._running.items() if id_ not in self._paused}
        for request_id in ended:
            del self._running[request_id]
        return [
            Delta(request_id=id_, sample=sequence.sample, token_ids=(1,), finish=DONE)
            for id_, sequences in ended.items()
            for sequence in sequences
        ]

    def note_told(self) -> None:
        self.num_told = self.num_spent

    def reset(self) -> None:
        self._enter("reset")
        self.num_resets += 1
        self._running.clear()

    def check_integrity(self) -> None:
        self._enter("check_integrity")

    def _enter(self, name: str) -> None:
        self.calls.append(name)
        if self.failures.get(name, 0) > 0:
            self.failures[name] -= 1
            raise RuntimeError(f"{name} was told to fail")


@dataclass
class Deliveries:
    """Everything that was delivered, by sequence; the first `num_failing` deliveries raise."""

    num_failing: int = 0
    endings: dict[tuple[str, int], list[Delta]] = field(default_factory=dict)
    load: Load = field(default_factory=Load)
    told: list[tuple[Spent, ...]] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, deltas: list[Delta], load: Load) -> None:
        with self._news:
            if self.num_failing:
                self.num_failing -= 1
                raise RuntimeError("delivery was told to fail")
            self.load = load
            self.told.append(load.spent)
            for delta in deltas:
                self.endings.setdefault((delta.request_id, delta.sample), []).append(delta)
            self._news.notify_all()

    def wait(self, *keys: tuple[str, int]) -> dict[tuple[str, int], list[Delta]]:
        with self._news:
            assert self._news.wait_for(lambda: all(key in self.endings for key in keys), timeout=30)
        return self.endings


@dataclass(frozen=True)
class Driven:
    driver: Driver
    engine: FakeEngine
    deliveries: Deliveries


@contextmanager
def driven(**failures: int) -> Iterator[Driven]:
    engine, deliveries = FakeEngine(), Deliveries()
    engine.failures.update(failures)
    driver = Driver(engine)
    driver.start(deliveries)
    try:
        yield Driven(driver, engine, deliveries)
    finally:
        engine.gate.set()
        driver.close()


def sequences(name: str, n: int = 1) -> list[Sequence]:
    asked: GenerationRequest = replace(request(name, n=n), client_request_id=f"client-{name}")
    tokenizer = TextTokenizer.load(DEMO, vocab_size=2048)
    return [Sequence(asked, [1], sample=s, max_tokens=4, detokenizer=tokenizer.detokenizer([1])) for s in range(n)]


def error_of(deltas: list[Delta]) -> str:
    """The message of the one ending that a sequence has."""
    endings = [delta for delta in deltas if delta.error is not None or delta.finish is not None]
    assert len(endings) == 1
    assert isinstance(endings[0].error, EngineFailed)
    return endings[0].error.message


def is_done(deltas: list[Delta]) -> bool:
    return [delta.finish for delta in deltas] == [DONE]


def test_a_request_that_cannot_be_added_ends_with_an_error_and_the_next_is_served() -> None:
    with driven(add=1) as all_:
        all_.driver.submit([sequences("bad", n=2), sequences("good")])
        seen = all_.deliveries.wait(("bad", 0), ("bad", 1), ("good", 0))
        assert "took this request" in error_of(seen["bad", 0])
        assert "took this request" in error_of(seen["bad", 1])
        assert is_done(seen["good", 0])
        assert all_.deliveries.load.num_failures == 1


def test_a_step_that_raises_ends_what_was_running_and_the_engine_begins_anew() -> None:
    with driven(step=1) as all_:
        all_.driver.submit([sequences("a", n=2)])
        seen = all_.deliveries.wait(("a", 0), ("a", 1))
        assert "while it computed" in error_of(seen["a", 0])
        all_.driver.submit([sequences("b")])
        assert is_done(all_.deliveries.wait(("b", 0))["b", 0])
        assert all_.engine.num_resets == 1
        all_.driver.check()


def test_books_that_do_not_balance_are_counted_and_the_engine_begins_anew() -> None:
    with driven(check_integrity=1) as all_:
        all_.driver.submit([sequences("a")])
        assert is_done(all_.deliveries.wait(("a", 0))["a", 0])
        all_.driver.submit([sequences("b")])
        assert is_done(all_.deliveries.wait(("b", 0))["b", 0])
        assert all_.engine.num_resets == 1
        assert all_.deliveries.load.num_failures == 1


def test_a_failed_delivery_ends_its_requests_with_an_error_even_where_they_had_finished() -> None:
    with driven() as all_:
        all_.deliveries.num_failing = 3
        all_.driver.submit([sequences("a", n=2)])
        seen = all_.deliveries.wait(("a", 0), ("a", 1))
        assert "were lost" in error_of(seen["a", 0])
        assert "were lost" in error_of(seen["a", 1])
        all_.driver.submit([sequences("b")])
        assert is_done(all_.deliveries.wait(("b", 0))["b", 0])


def test_an_abort_that_raises_clears_the_engine_and_serving_goes_on() -> None:
    with driven(abort=2) as all_:
        all_.engine.holds = True
        all_.driver.submit([sequences("a"), sequences("beside")])
        all_.driver.abort(frozenset({"a"}))
        assert "while it computed" in error_of(all_.deliveries.wait(("beside", 0))["beside", 0])
        all_.engine.holds = False
        all_.driver.submit([sequences("b")])
        assert is_done(all_.deliveries.wait(("b", 0))["b", 0])
        assert ("a", 0) not in all_.deliveries.endings


@pytest.mark.law("One ending")
def test_a_sequence_that_the_engine_forgets_ends_with_an_error() -> None:
    with driven() as all_:
        all_.engine.forgets = True
        all_.driver.submit([sequences("a")])
        assert "lost this request" in error_of(all_.deliveries.wait(("a", 0))["a", 0])


def test_a_failing_recovery_does_not_end_the_thread() -> None:
    with driven(step=1, reset=1) as all_:
        all_.driver.submit([sequences("a")])
        assert "while it computed" in error_of(all_.deliveries.wait(("a", 0))["a", 0])
        all_.driver.submit([sequences("b")])
        assert is_done(all_.deliveries.wait(("b", 0))["b", 0])


def test_an_engine_that_only_fails_is_given_up_and_one_good_step_takes_that_back() -> None:
    with driven(step=MAX_FAILURES_IN_A_ROW) as all_:
        for number in range(MAX_FAILURES_IN_A_ROW):
            all_.driver.check()
            all_.driver.submit([sequences(f"a{number}")])
            all_.deliveries.wait((f"a{number}", 0))
        with pytest.raises(EngineFailed, match=f"failed {MAX_FAILURES_IN_A_ROW} times in a row"):
            all_.driver.check()
        all_.driver.submit([sequences("good")])
        assert is_done(all_.deliveries.wait(("good", 0))["good", 0])
        all_.driver.check()


def test_steps_that_the_engine_itself_reports_as_failed_count_too() -> None:
    with driven() as all_:
        all_.engine.reports_failures = True
        for number in range(MAX_FAILURES_IN_A_ROW):
            all_.driver.check()
            all_.driver.submit([sequences(f"a{number}")])
            all_.deliveries.wait((f"a{number}", 0))
        with pytest.raises(EngineFailed, match="times in a row"):
            all_.driver.check()
        assert all_.deliveries.load.num_failures == MAX_FAILURES_IN_A_ROW


def test_what_is_spent_in_steps_that_give_nothing_is_told_after_a_silence_and_again_where_it_could_not_be() -> None:
    now = [0.0]
    engine, deliveries = FakeEngine(), Deliveries()
    engine.holds = engine.spends = True
    driver = Driver(engine, clock=lambda: now[0])
    driver.start(deliveries)

    def step(number: int) -> None:
        until = engine.num_spent + number
        while engine.num_spent < until:
            threading.Event().wait(0.001)

    try:
        driver.submit([sequences("a")])
        step(50)
        for _ in range(3):
            now[0] += 0.7 * SILENCE_S
            driver.nudge()
            step(3)
        assert len(deliveries.told) == 4, "behind each command, and it was not silent for long enough"
        deliveries.num_failing = 1
        for _ in range(2):
            now[0] += SILENCE_S
            step(3)
    finally:
        driver.close()
    assert (len(deliveries.told), deliveries.num_failing) == (5, 0), "what failed is told with the next"
    assert deliveries.told[-1][0].engine_ns > deliveries.told[-2][0].engine_ns


def test_a_step_that_does_not_end_is_noticed_on_the_clock() -> None:
    now = [0.0]
    engine, deliveries = FakeEngine(), Deliveries()
    engine.gate.clear()
    driver = Driver(engine, clock=lambda: now[0])
    driver.start(deliveries)
    driver.submit([sequences("a")])
    while "add" not in engine.calls:
        threading.Event().wait(0.001)
    driver.check()
    now[0] = STALL_S + 1
    with pytest.raises(EngineFailed, match="in one step"):
        driver.check()
    engine.gate.set()
    driver.close()


def test_paused_requests_alone_let_the_thread_sleep_and_are_not_taken_for_forgotten() -> None:
    with driven() as all_:
        all_.engine.gate.clear()
        all_.driver.submit([sequences("warm")])  # the thread waits in a step while the next three are posted
        all_.driver.submit([sequences("slow")])
        all_.driver.pause(frozenset({"slow", "unknown"}))
        all_.driver.submit([sequences("quick")])
        all_.engine.gate.set()
        assert is_done(all_.deliveries.wait(("quick", 0))["quick", 0])
        assert ("slow", 0) not in all_.deliveries.endings
        all_.driver.resume(frozenset({"slow"}))
        assert is_done(all_.deliveries.wait(("slow", 0))["slow", 0])
        assert all_.deliveries.load.num_failures == 0
        assert all_.engine.calls.count("step") < 10


def test_the_load_is_the_engines_own_before_the_first_step() -> None:
    with driven() as all_:
        assert all_.driver.load.num_blocks == 7


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, tuple[str, ...]]]:
    """What each line says, and the requests that it names."""
    return [(each.getMessage(), getattr(each, "request_ids", ())) for each in caplog.records]


def test_a_failed_step_names_the_requests_that_it_ended_and_a_bounded_number_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = [f"{number:03}" for number in range(MAX_NAMED + 8)]
    with driven() as all_:
        all_.engine.holds = True
        all_.driver.submit([sequences(name, n=2) for name in names])
        while all_.engine.calls.count("add") < len(names):
            threading.Event().wait(0.001)
        all_.engine.failures["step"] = 1
        all_.driver.nudge()
        all_.deliveries.wait(*((name, 1) for name in names))
    (line,) = lines(caplog)
    assert line == (
        f"a step of the engine failed (1 in a row, of {len(names)} requests)",
        tuple(f"client-{name}" for name in names[:MAX_NAMED]),
    )


@pytest.mark.parametrize(
    ("failures", "said"),
    [
        ({"add": 1}, ["a command to the engine failed (1 in a row, of 1 requests)"]),
        (
            {"step": 1, "reset": 1},
            [
                "a step of the engine failed (1 in a row, of 1 requests)",
                "the engine could not be brought back after a failure (2 in a row, of 1 requests)",
            ],
        ),
    ],
)
def test_whatever_fails_names_its_request(
    caplog: pytest.LogCaptureFixture, failures: dict[str, int], said: list[str]
) -> None:
    with driven(**failures) as all_:
        all_.driver.submit([sequences("a")])
        all_.deliveries.wait(("a", 0))
    assert lines(caplog) == [(each, ("client-a",)) for each in said]


def test_a_request_that_ended_is_named_until_its_ending_was_delivered(caplog: pytest.LogCaptureFixture) -> None:
    with driven() as all_:
        all_.deliveries.num_failing = 2
        all_.driver.submit([sequences("a")])
        all_.deliveries.wait(("a", 0))
    assert [names for _, names in lines(caplog)] == [("client-a",)] * 2


def test_who_is_ended_beside_a_request_that_cannot_be_is_named_with_it(caplog: pytest.LogCaptureFixture) -> None:
    with driven(abort=2) as all_:
        all_.engine.holds = True
        all_.driver.submit([sequences("a"), sequences("beside")])
        all_.driver.abort(frozenset({"a"}))
        all_.deliveries.wait(("beside", 0))
    assert lines(caplog)[-1] == (
        "requests could not be ended (2 in a row, of 2 requests)",
        ("client-a", "client-beside"),
    )


def test_names_are_kept_no_longer_than_requests() -> None:
    kept = OpenSequences()
    for number in range(1000):
        kept.begin(str(number), [0], client_request_id="a")
        kept.take([Delta(request_id=str(number), sample=0, finish=DONE)])
        kept.note_told()
    assert kept.names_of({str(number) for number in range(1000)}) == []
    kept.begin("open", [0], client_request_id="b")
    kept.end(["unknown"])
    kept.note_told()
    assert kept.names_of({"open", "unknown"}) == ["b"]
