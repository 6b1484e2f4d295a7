"""One book of who answers what under which key: bounded, and true whoever dies."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from serve_app.core.errors import KeyReused
from serve_app.router import idempotency as claims_module
from serve_app.router.idempotency import LOST_S, MESSAGE_BYTES, Claim, Claims, Message, ReplaySettings, Standing

YOURS, RUNNING = Standing.YOURS, Standing.RUNNING
ANSWER: tuple[Message, ...] = ({"type": "http.response.body", "body": b"x" * 100},)
SIZE = MESSAGE_BYTES + 100


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def claim(key: str = "k", tenant: str = "acme", fingerprint: bytes = b"f", attempt: str = "1") -> Claim:
    return Claim(tenant=tenant, key=key, fingerprint=fingerprint, attempt=attempt, seconds=60.0)


def test_one_router_computes_and_all_have_its_answer(clock: Clock) -> None:
    claims = Claims(clock=clock)
    assert [claims.claim(claim(), name) for name in "aba"] == [YOURS, RUNNING, YOURS]
    claims.deliver(claim(), "b", ANSWER)  # it was not asked
    assert claims.claim(claim(), "b") is RUNNING
    claims.deliver(claim(), "a", ANSWER)
    assert [claims.claim(claim(), name) for name in "abc"] == [ANSWER] * 3
    with pytest.raises(KeyReused):
        claims.claim(claim(fingerprint=b"g"), "c")
    assert claims.claim(claim(tenant="beta"), "c") is YOURS


def test_what_is_not_kept_is_anybodys_and_what_is_kept_has_its_time(clock: Clock) -> None:
    claims = Claims(clock=clock)
    claims.claim(claim(), "a")
    claims.deliver(claim(), "a", None)
    assert claims.claim(claim(), "b") is YOURS
    claims.deliver(claim(), "b", ANSWER)
    clock.now = 59.9
    assert claims.claim(claim(), "c") == ANSWER
    clock.now = 60.0
    assert claims.claim(claim(), "c") is YOURS


@pytest.mark.law("One answer")
def test_a_router_that_was_not_heard_of_leaves_its_work_to_others(clock: Clock) -> None:
    claims = Claims(clock=clock)
    claims.claim(claim(), "a")
    clock.now = LOST_S / 2
    claims.heard("a", [(claim(), True)])
    clock.now = LOST_S
    assert claims.claim(claim(), "b") is RUNNING
    clock.now = LOST_S * 1.5
    assert claims.claim(claim(), "b") is YOURS
    claims.deliver(claim(), "a", ANSWER)  # it was only slow; the other one computes now
    assert claims.claim(claim(), "c") is RUNNING


def test_a_request_holds_its_key_for_as_long_as_it_is_answered(clock: Clock) -> None:
    claims = Claims(clock=clock)
    claims.claim(claim(), "a")
    for _ in range(50_000):  # the time for which an answer is good is long over
        clock.now += LOST_S / 2
        claims.heard("a", [(claim(), True)])
    assert claims.claim(claim(), "b") is RUNNING


def test_what_its_router_says_no_more_is_anybodys_though_the_router_lives(clock: Clock) -> None:
    """A claim may reach the book after the word that it is over, and that word may be lost."""
    claims = Claims(clock=clock)
    claims.deliver(claim(), "a", None)
    claims.claim(claim(), "a")
    claims.claim(claim("other"), "a")
    for _ in range(10):
        clock.now += LOST_S / 10
        claims.heard("a", [(claim("other"), True)])
        claims.heard("b", [(claim(), False)])  # which has nothing there
        claims.heard("a", [(claim(attempt="2"), False)])
    assert claims.claim(claim(), "b") is YOURS
    assert claims.claim(claim("other"), "b") is RUNNING


def test_an_answer_is_taken_in_by_a_book_that_was_begun_anew(clock: Clock) -> None:
    claims = Claims(clock=clock)
    claims.deliver(claim(), "a", ANSWER)
    assert claims.claim(claim(), "b") == ANSWER


def test_a_book_that_was_begun_anew_learns_what_routers_answer(clock: Clock) -> None:
    claims = Claims(clock=clock, learns_s=3.0)
    assert claims.claim(claim(attempt="2"), "b") is RUNNING, "another router may answer it, which has not told yet"
    claims.heard("b", [(claim(attempt="2"), False)])
    claims.heard("a", [(claim(), True)])
    clock.now = 3.0
    assert claims.claim(claim(attempt="2"), "b") is RUNNING
    assert claims.claim(claim("other"), "b") is YOURS
    claims.deliver(claim(), "a", ANSWER)
    claims.heard("a", [(claim(), True)])  # said before it was delivered
    assert claims.claim(claim(attempt="2"), "b") == ANSWER


def test_what_is_kept_is_bounded_of_a_tenant_and_of_all(clock: Clock) -> None:
    settings = ReplaySettings(max_answers=4, max_bytes=3 * SIZE)
    claims = Claims(clock=clock, settings=settings, max_total_bytes=5 * SIZE)
    for tenant in ("acme", "beta", "gamma"):
        for number in range(10):
            claims.claim(claim(str(number), tenant), "a")
            claims.deliver(claim(str(number), tenant), "a", ANSWER)
            assert claims._kept.num_bytes <= 5 * SIZE
    assert [claims.claim(claim(str(number), "gamma"), "a") for number in (7, 8, 9)] == [ANSWER] * 3
    assert claims.claim(claim("0", "acme"), "a") is YOURS


def test_what_is_still_computed_is_never_given_up_for_what_is_new(clock: Clock) -> None:
    claims = Claims(clock=clock, settings=ReplaySettings(max_answers=2, max_bytes=2 * SIZE))
    claims.claim(claim("slow"), "a")
    for number in range(5):
        claims.claim(claim(str(number)), "a")
        claims.deliver(claim(str(number)), "a", ANSWER)
    assert claims.claim(claim("slow"), "b") is RUNNING


def test_another_request_under_the_key_takes_no_claim_away(clock: Clock) -> None:
    claims = Claims(clock=clock)
    claims.claim(claim(), "a")
    with pytest.raises(KeyReused):
        claims.claim(claim(fingerprint=b"g", attempt="2"), "a")
    for answer in (None, ANSWER):
        claims.deliver(claim(fingerprint=b"g", attempt="2"), "a", answer)
        assert claims.claim(claim(), "b") is RUNNING


@pytest.mark.parametrize("answer", [None, ANSWER])
def test_a_late_word_of_an_attempt_leaves_the_claim_of_the_repeat(
    clock: Clock, answer: tuple[Message, ...] | None
) -> None:
    claims = Claims(clock=clock)
    assert [claims.claim(claim(attempt=each), "a") for each in "12"] == [YOURS, YOURS]
    claims.deliver(claim(attempt="1"), "a", answer)
    assert claims.claim(claim(), "b") is RUNNING
    claims.deliver(claim(attempt="2"), "a", ANSWER)
    assert claims.claim(claim(), "b") == ANSWER


def test_nothing_is_known_of_what_routers_left_that_are_gone(clock: Clock) -> None:
    claims = Claims(clock=clock)
    for number in range(10):
        claims.claim(claim(str(number)), "gone")
    clock.now = LOST_S
    claims.heard("a")
    assert not claims._running


def lines_run(claims: Claims, key: str) -> int:
    """Of the book, by a claim and the delivery of its answer."""
    num_lines = 0

    def count(frame: FrameType, event: str, argument: object) -> object:
        nonlocal num_lines
        if frame.f_code.co_filename != claims_module.__file__:
            return None
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)  # type: ignore[arg-type]
    try:
        claims.claim(claim(key), "a")
        claims.deliver(claim(key), "a", ANSWER)
    finally:
        sys.settrace(before)
    return num_lines


@pytest.mark.parametrize("is_full", [False, True])
def test_what_a_call_costs_does_not_grow_with_what_is_kept(clock: Clock, is_full: bool) -> None:
    costs = []
    for num_tenants, num_keys in ((1, 10), (20, 100)):
        bound = num_tenants * num_keys * SIZE if is_full else 1 << 30
        claims = Claims(clock=clock, max_total_bytes=bound)
        for number in range(num_tenants * num_keys):
            each = claim(str(number // num_tenants), f"t{number % num_tenants}")
            claims.claim(each, "a")
            claims.deliver(each, "a", ANSWER)
            claims.claim(claim(f"still computed {number}"), "a")
        assert claims._kept.num_bytes == num_tenants * num_keys * SIZE
        costs.append(lines_run(claims, "new"))
    assert costs[0] == costs[1] > 10


def test_what_is_old_goes_of_whichever_tenant(clock: Clock) -> None:
    claims = Claims(clock=clock)
    for tenant in ("acme", "beta", "gamma"):
        claims.deliver(claim(tenant=tenant), "a", ANSWER)
    clock.now = 60.0
    claims.deliver(claim("k2"), "a", ANSWER)
    assert (claims._kept.num_bytes, set(claims._kept._by_tenant)) == (SIZE, {"acme"})
