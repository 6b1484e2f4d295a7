"""Which of the lines of batches that wait begins next."""

from __future__ import annotations

from serve_app.core.batches import Line
from serve_app.router.batch_worker import in_turn


def test_batches_take_turns_with_the_lines_that_wait() -> None:
    waiting = ("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2)
    lines = [Line(batch=batch, number=number, offset=0, length=1) for batch, number in waiting]
    assert [line.key for line in in_turn(lines)] == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3)]
