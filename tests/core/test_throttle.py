"""What may cost a hundredth of all time costs no more, however long it takes."""

from __future__ import annotations

import pytest

from serve_app.core.machine import Throttle


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.1])
def test_what_takes_long_is_done_a_hundredth_of_the_time(seconds: float) -> None:
    clock = Clock()
    throttle = Throttle(clock)
    num_done = 0
    while clock() < 100.0:
        if throttle.is_due:
            num_done += 1
            with throttle.spending():
                clock.now += seconds
        clock.now += 0.05
    if seconds == 0:
        assert num_done >= 1999  # as often as asked
    else:
        assert 0.6 < num_done * seconds <= 1.1


def test_what_fails_has_taken_its_time_too() -> None:
    clock = Clock()
    throttle = Throttle(clock)

    def fail() -> None:
        with throttle.spending():
            clock.now += 1.0
            raise ValueError("it fails")

    with pytest.raises(ValueError, match="it fails"):
        fail()
    assert not throttle.is_due
    clock.now += 99.5
    assert throttle.is_due
