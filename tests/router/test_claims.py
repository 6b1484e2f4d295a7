"""One book of who answers what under which key: bounded, and true whoever dies."""

from __future__ import annotations

import pytest

from serve_app.core.errors import KeyReused
from serve_app.router.claims import LOST_S, Claim, Claims, Standing
from serve_app.router.replays import MESSAGE_BYTES, Message, ReplaySettings

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


def claim(key: str = "k", tenant: str = "acme", fingerprint: bytes = b"f") -> Claim:
    return Claim(tenant=tenant, key=key, fingerprint=fingerprint, seconds=60.0)


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


def test_a_router_that_was_not_heard_of_leaves_its_work_to_others(clock: Clock) -> None:
    claims = Claims(clock=clock)
    claims.claim(claim(), "a")
    clock.now = LOST_S / 2
    claims.heard("a")
    clock.now = LOST_S
    assert claims.claim(claim(), "b") is RUNNING
    clock.now = LOST_S * 1.5
    assert claims.claim(claim(), "b") is YOURS
    claims.deliver(claim(), "a", ANSWER)  # it was only slow; the other one computes now
    assert claims.claim(claim(), "c") is RUNNING


def test_an_answer_is_taken_in_by_a_book_that_was_begun_anew(clock: Clock) -> None:
    claims = Claims(clock=clock)
    claims.deliver(claim(), "a", ANSWER)
    assert claims.claim(claim(), "b") == ANSWER


def test_what_is_kept_is_bounded_of_a_tenant_and_of_all(clock: Clock) -> None:
    settings = ReplaySettings(max_answers=4, max_bytes=3 * SIZE)
    claims = Claims(clock=clock, settings=settings, max_total_bytes=5 * SIZE)
    for tenant in ("acme", "beta", "gamma"):
        for number in range(10):
            claims.claim(claim(str(number), tenant), "a")
            claims.deliver(claim(str(number), tenant), "a", ANSWER)
            assert claims.num_bytes <= 5 * SIZE
    assert [claims.claim(claim(str(number), "gamma"), "a") for number in (7, 8, 9)] == [ANSWER] * 3
    assert claims.claim(claim("0", "acme"), "a") is YOURS


def test_what_is_still_computed_is_never_given_up_for_what_is_new(clock: Clock) -> None:
    claims = Claims(clock=clock, settings=ReplaySettings(max_answers=2, max_bytes=2 * SIZE))
    claims.claim(claim("slow"), "a")
    for number in range(5):
        claims.claim(claim(str(number)), "a")
        claims.deliver(claim(str(number)), "a", ANSWER)
    assert claims.claim(claim("slow"), "b") is RUNNING
