"""A link brings every delta to its request and loses none when the replica is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace

import pytest

from serve_app.core.delta import Delta, Finish, FinishReason
from serve_app.core.errors import Overloaded, ReplicaLost
from serve_app.core.log_context import MAX_NAMED
from serve_app.core.names import ModelRef
from serve_app.core.prompt import Image, Prompt
from serve_app.core.request import GenerationRequest, StopParams
from serve_app.router.link import Guess, Habits, ReplicaLink
from tests.fakes import FakeBackend


def make_request(request_id: str, *, n: int = 1, max_tokens: int = 2) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        client_request_id=f"client-{request_id}",
        model=ModelRef(base="tiny"),
        prompt=Prompt(parts=("Hello",)),
        n=n,
        stop=StopParams(max_tokens=max_tokens),
    )


@asynccontextmanager
async def linked(backend: FakeBackend) -> AsyncIterator[ReplicaLink]:
    link = ReplicaLink(backend, backend.card, "router-0")
    link.start()
    try:
        yield link
    finally:
        await link.close()


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_each_delta_reaches_the_inbox_of_its_request():
    async with linked(FakeBackend()) as link:
        first: list[Delta] = []
        second: list[Delta] = []
        assert await link.submit([make_request("a")], first.append) is True
        assert await link.submit([make_request("b")], second.append) is True
        await settle()
    assert [delta.request_id for delta in first] == ["a", "a"]
    assert [delta.request_id for delta in second] == ["b", "b"]
    assert first[-1].finish is not None


async def test_deltas_that_come_before_the_answer_to_the_submission_are_not_lost():
    backend = FakeBackend(is_stepped=True)
    backend.submit_gate.clear()
    async with linked(backend) as link:
        inbox: list[Delta] = []
        task = link.submit([make_request("a")], inbox.append)
        backend.send("router-0", Delta(request_id="a", sample=0, text="early"))
        await settle()
        assert not task.done()
        assert [delta.text for delta in inbox] == ["early"]
        backend.submit_gate.set()


async def test_sequences_are_counted_from_submission_to_their_end():
    backend = FakeBackend(is_stepped=True)
    async with linked(backend) as link:
        await link.submit([make_request("a", n=3), make_request("b", max_tokens=1)], lambda _: None)
        assert link.num_outstanding == 4
        backend.step()
        await settle()
        assert link.num_outstanding == 3
        link.abort(["a"])
        assert link.num_outstanding == 0


async def test_work_of_other_routers_counts_for_the_standing():
    backend = FakeBackend(is_stepped=True)
    await backend.submit("router-1", [make_request("other", n=5)])
    async with linked(backend) as link:
        await link.submit([make_request("mine", n=2)], lambda _: None)
        backend.step()
        await settle()
        assert (link.work, link.capacity) == (7, 100)


async def test_tokens_of_prompts_wait_until_their_replica_has_told_of_them_or_they_are_forgotten():
    backend, habits = FakeBackend(is_stepped=True), Habits()
    async with linked(backend) as link:
        guesses = [Guess(habits, num_missing=300.0), Guess(habits, num_missing=200.0), Guess(habits, num_missing=50.0)]
        requests = [make_request("a"), make_request("b", n=2), make_request("c")]
        await link.submit(requests[:2], lambda _: None, guesses[:2])
        assert link.num_prompt_tokens == 500
        backend.step()
        await settle()
        assert (link.num_prompt_tokens, link.work) == (0, 3)
        assert habits.prompt_tokens < 64
        await link.submit(requests[2:], lambda _: None, guesses[2:])
        assert link.num_prompt_tokens == 50
        link.abort(["c"])
        assert link.num_prompt_tokens == 0
        backend.step()
        await settle()
        assert habits.completion_tokens < 64


async def test_the_pace_follows_prompts_that_are_long_enough_and_streamed():
    backend = FakeBackend(is_stepped=True)
    async with linked(backend) as link:
        short, long = make_request("a"), replace(make_request("b"), prompt=Prompt(parts=("word " * 200_000,)))
        gathered = replace(long, request_id="c", is_read_whole=True)
        await link.submit([short, gathered], lambda _: None)
        backend.step()
        await settle()
        assert link.pace is None
        await link.submit([long], lambda _: None)
        backend.step()
        await settle()
        assert link.pace is not None
        assert link.pace > 0


async def test_no_delta_follows_an_abort():
    backend = FakeBackend(is_stepped=True)
    async with linked(backend) as link:
        inbox: list[Delta] = []
        await link.submit([make_request("a")], inbox.append)
        backend.step()
        await link.abort(["a"])
        await settle()
        assert inbox == []
        assert backend.aborted == ["a"]


async def test_an_abort_waits_for_the_submission_it_overtook():
    backend = FakeBackend(is_stepped=True)
    backend.submit_gate.clear()
    async with linked(backend) as link:
        link.submit([make_request("a")], lambda _: None)
        aborted = link.abort(["a"])
        await settle()
        assert backend.aborted == []
        backend.submit_gate.set()
        await aborted
        assert (backend.aborted, backend.num_live) == (["a"], 0)


@pytest.mark.parametrize(
    "parts", [("Hello", Image(data=b"", name="images[0]")), ("x" * 40_000,)], ids=["images", "long texts"]
)
async def test_who_leaves_while_images_are_seen_or_long_texts_wait_has_nothing_more_done_for_them(parts):
    backend = FakeBackend(is_stepped=True)
    backend.submit_gate.clear()
    async with linked(backend) as link:
        link.submit([replace(make_request("a"), prompt=Prompt(parts=parts))], lambda _: None)
        await settle()
        aborted = link.abort(["a"])
        await settle()
        assert backend.aborted == ["a"], "the replica hears of it before it has taken the request in"
        backend.submit_gate.set()
        await aborted
        assert (backend.aborted, backend.num_live) == (["a", "a"], 0)


async def test_a_refusal_is_given_to_the_submitter_and_leaves_nothing_behind():
    backend = FakeBackend()
    backend.refusal = Overloaded("full", None, {"retry_after_s": 1})
    async with linked(backend) as link:
        refusal = await link.submit([make_request("a", n=4)], lambda _: None)
        assert refusal is backend.refusal
        assert link.num_outstanding == 0


@pytest.mark.parametrize("error", [None, ConnectionResetError("gone")])
async def test_a_lost_replica_loses_each_live_request_once(error):
    backend = FakeBackend(is_stepped=True)
    async with linked(backend) as link:
        inbox: list[Delta] = []
        await link.submit([make_request("a", n=2), make_request("b")], inbox.append)
        backend.die(error)
        await settle()
        assert [delta.request_id for delta in inbox] == ["a", "b"]
        assert all(isinstance(delta.error, ReplicaLost) for delta in inbox)
        assert not link.is_open
        assert link.num_outstanding == 0
        assert isinstance(await link.submit([make_request("c")], inbox.append), ReplicaLost)


async def test_a_replica_that_cannot_be_reached_counts_as_lost():
    backend = FakeBackend()
    backend.refusal = ConnectionError("no route")
    async with linked(backend) as link:
        assert isinstance(await link.submit([make_request("a")], lambda _: None), ReplicaLost)


async def test_a_retired_link_lets_what_runs_end_and_then_closes():
    backend = FakeBackend(is_stepped=True)
    async with linked(backend) as link:
        inbox: list[Delta] = []
        await link.submit([make_request("a", max_tokens=1)], inbox.append)
        await settle()
        link.retire()
        await settle()
        assert backend.num_attached == 1
        assert not link.is_open
        backend.step()
        await settle()
        assert inbox[-1].finish == Finish(reason=FinishReason.LENGTH, matched_stop=None, num_tokens=1)
        assert backend.num_attached == 0


async def test_the_stream_outlives_the_task_that_started_the_link():
    backend = FakeBackend()
    link = ReplicaLink(backend, backend.card, "router-0")
    starter = asyncio.ensure_future(_start_and_wait(link))
    await settle()
    starter.cancel()
    await settle()
    assert backend.num_attached == 1
    await link.close()
    assert backend.num_attached == 0


CLIENT = ContextVar("CLIENT", default="nobody")


class ContextKeeper(FakeBackend):
    """Keeps in whose context it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.clients: list[str] = []

    async def submit(self, router_id: str, requests: Sequence[GenerationRequest]) -> bool:
        self.clients.append(CLIENT.get())
        return await super().submit(router_id, requests)

    async def abort(self, router_id: str, request_ids: Sequence[str]) -> None:
        self.clients.append(CLIENT.get())
        await super().abort(router_id, request_ids)


async def test_a_replica_is_called_outside_the_context_of_the_client_request():
    backend = ContextKeeper()
    async with linked(backend) as link:
        CLIENT.set("a client")
        await link.submit([make_request("a")], lambda _: None)
        await link.abort(["a"])
    assert backend.clients == ["nobody", "nobody"]


async def _start_and_wait(link: ReplicaLink) -> None:
    link.start()
    await asyncio.Event().wait()


class LateAnswers(FakeBackend):
    """Answers a pause only once the gate is open, and keeps the order in which things were done."""

    def __init__(self) -> None:
        super().__init__(is_stepped=True)
        self.gate = asyncio.Event()
        self.done: list[str] = []
        self.cannot_resume = False

    async def pause(self, router_id: str, request_ids: Sequence[str]) -> None:
        await self.gate.wait()
        self.done.append("pause")

    async def resume(self, router_id: str, request_ids: Sequence[str]) -> None:
        if self.cannot_resume:
            raise ConnectionError("no route")
        self.done.append("resume")


async def test_a_resumption_does_not_overtake_the_pause_before_it():
    backend = LateAnswers()
    async with linked(backend) as link:
        await link.submit([make_request("a")], lambda _: None)
        link.pause(["a"])
        resumed = link.resume(["a"])
        await settle()
        assert backend.done == []
        backend.gate.set()
        await resumed
        assert backend.done == ["pause", "resume"]


async def test_a_pause_waits_for_the_submission_it_overtook():
    backend = FakeBackend(is_stepped=True)
    backend.submit_gate.clear()
    async with linked(backend) as link:
        link.submit([make_request("a")], lambda _: None)
        paused = link.pause(["a"])
        await settle()
        assert not paused.done()
        backend.submit_gate.set()
        await paused
        assert backend.paused == {"a"}


async def test_a_request_that_cannot_be_resumed_is_lost_and_not_left_waiting():
    backend = LateAnswers()
    backend.cannot_resume = True
    async with linked(backend) as link:
        inbox: list[Delta] = []
        await link.submit([make_request("a", n=2), make_request("b")], inbox.append)
        await link.resume(["a"])
        assert [delta.request_id for delta in inbox] == ["a"]
        assert isinstance(inbox[0].error, ReplicaLost)
        assert link.num_outstanding == 1


class Unreachable(FakeBackend):
    """Takes requests, and hears nothing after that."""

    async def abort(self, router_id: str, request_ids: Sequence[str]) -> None:
        raise ConnectionError("no route")

    pause = resume = abort


async def test_lines_about_a_replica_name_the_requests_that_they_concern(caplog: pytest.LogCaptureFixture):
    backend = Unreachable(is_stepped=True)
    async with linked(backend) as link:
        names = [f"r{number:03}" for number in range(MAX_NAMED + 8)]
        await link.submit([make_request(name) for name in names], lambda _: None)
        assert not await link.pause(names[:2])
        assert not await link.abort(names[:1])
        await link.resume(names[1:2])
        backend.die(ConnectionResetError("gone"))
        await settle()
    said = [(each.getMessage().partition(":")[0], getattr(each, "request_ids", ())) for each in caplog.records]
    assert said == [
        ("replica replica-0 could not be told of 2 requests", ("client-r000", "client-r001")),
        ("replica replica-0 could not be told of 1 requests", ("client-r000",)),
        ("replica replica-0 could not be told of 1 requests", ("client-r001",)),
        ("replica replica-0 went away", tuple(f"client-{name}" for name in names[2 : MAX_NAMED + 2])),
    ]
