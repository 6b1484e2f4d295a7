"""Which of the lines of batches that wait begins next, and when Accounts are asked for more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.core.batches import BatchCard, BatchState, Key, Line, Work
from serve_app.router import batch_worker
from serve_app.router.batch_worker import BatchWorker, in_turn
from tests.fakes import settle


def test_batches_take_turns_with_the_lines_that_wait() -> None:
    waiting = ("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2)
    lines = [Line(batch=batch, number=number, offset=0, length=1) for batch, number in waiting]
    assert [line.key for line in in_turn(lines)] == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3)]


async def test_accounts_are_asked_as_lines_run_out_or_a_file_is_done_and_else_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_worker, "LEAST_S", 0.0)
    monkeypatch.setattr(batch_worker, "MOST_S", 3600.0)
    num_asked, batches = 0, tuple[BatchCard, ...]()

    async def ask(*_: object) -> Work:
        nonlocal num_asked
        num_asked += 1
        return Work(batches=batches)

    fleet = SimpleNamespace(counts=None, router_id="r", rooms={}, cards={})
    nothing: Any = SimpleNamespace(fleet=fleet, accounting=None)
    worker = BatchWorker(ask, nothing, nothing, nothing, lambda name: None)
    running = asyncio.create_task(worker.run())

    async def asked_when_this_ends(key: Key) -> bool:
        before = num_asked
        worker._begin(key, asyncio.sleep(0))
        await settle()
        return num_asked > before

    await settle()
    assert num_asked == 1
    assert await asked_when_this_ends(("a", 1))
    worker._ready.append(Line(batch="a", number=2, offset=0, length=1))
    assert not await asked_when_this_ends(("a", 1))
    assert await asked_when_this_ends(("a", 0)), "the input was checked, or the output is written"

    batch = {"id": "b", "tenant": "acme", "key_id": "", "endpoint": "/v1/completions", "model": "m", "input_file": ""}
    batches = (BatchCard(state=BatchState.IN_PROGRESS, outcome=BatchState.COMPLETED, num_left=1, **batch),)
    assert await asked_when_this_ends(("a", 0))
    assert num_asked == 5, "once to learn that the batch began, once for its lines"
    running.cancel()
