"""What may cost a hundredth of all time costs no more, however long it takes."""

from __future__ import annotations

import pytest

from serve_app.core.rate_limited_log import Seldom


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.1])
def test_what_takes_long_is_done_a_hundredth_of_the_time(seconds: float) -> None:
    clock = Clock()
    seldom = Seldom(clock)
    num_done = 0
    while clock() < 100.0:
        if seldom.is_time:
            num_done += 1
            with seldom.doing():
                clock.now += seconds
        clock.now += 0.05
    if seconds == 0:
        assert num_done >= 1999  # as often as asked
    else:
        assert 0.6 < num_done * seconds <= 1.1


def test_what_fails_has_taken_its_time_too() -> None:
    clock = Clock()
    seldom = Seldom(clock)

    def fail() -> None:
        with seldom.doing():
            clock.now += 1.0
            raise ValueError("it fails")

    with pytest.raises(ValueError, match="it fails"):
        fail()
    assert not seldom.is_time
    clock.now += 99.5
    assert seldom.is_time
