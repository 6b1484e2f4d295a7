"""A router's outbox: one frame of all that gathered, bounded by what was generated, closed when it was read."""

from __future__ import annotations

import asyncio
import random

import pytest

from serve_app.core.delta import (
    Delta,
    Finish,
    FinishReason,
    Frame,
    Load,
    PromptReport,
    Recording,
    TokenLogprob,
    TopLogprob,
    joined,
)
from serve_app.core.errors import EngineFailed
from serve_app.core.ledger import Spent
from serve_app.replica.delivery import Outbox

DONE = Finish(reason=FinishReason.STOP, matched_stop=None, num_tokens=3)
REPORT = PromptReport(num_tokens=2, num_cached_tokens=0)


def logprob(token_id: int) -> TokenLogprob:
    top = (TopLogprob(token_id=1, text="a", logprob=-1.0),)
    return TokenLogprob(token_id=token_id, text="x", logprob=-0.5, offset=token_id, top=top)


async def read(outbox: Outbox) -> list[Frame]:
    async with asyncio.timeout(60):
        return [frame async for frame in outbox.frames()]


async def test_a_stream_that_is_closed_with_deltas_pending_gives_them_and_ends() -> None:
    outbox = Outbox(100)
    outbox.put([Delta(request_id="a", sample=0, text="x")], Load(num_running=3))
    outbox.close()
    (frame,) = await read(outbox)
    assert [delta.text for delta in frame.deltas] == ["x"]
    assert frame.load.num_running == 3


async def test_a_heartbeat_is_a_frame_where_there_is_nothing_else_to_tell() -> None:
    outbox, spent = Outbox(100), Spent(flow="a", prompt_tokens=1)
    outbox.put([Delta(request_id="a", sample=0)], Load(spent=(spent,)))
    for num_running in (1, 2):
        outbox.beat(Load(num_running=num_running, spent=(spent,)))
    frames = outbox.frames()
    async with asyncio.timeout(60):
        first = await anext(frames)
        assert (len(first.deltas), first.load) == (1, Load(num_running=2, spent=(spent,)))
        outbox.beat(Load(num_running=3, spent=(spent,)))
        assert await anext(frames) == Frame(deltas=(), load=Load(num_running=3))
    outbox.close()
    assert await read(outbox) == []


async def test_a_stream_closed_while_its_frame_is_read_ends() -> None:
    outbox = Outbox(100)
    outbox.put([Delta(request_id="a", sample=0)], Load())
    frames = outbox.frames()
    async with asyncio.timeout(60):
        await anext(frames)
        outbox.put([Delta(request_id="b", sample=0)], Load())
        outbox.close()
        assert [delta.request_id for delta in (await anext(frames)).deltas] == ["b"]
        with pytest.raises(StopAsyncIteration):
            await anext(frames)


async def test_deltas_within_the_bound_are_given_one_by_one() -> None:
    outbox = Outbox(10)
    for _ in range(10):
        outbox.put([Delta(request_id="a", sample=0, text="x")], Load())
    outbox.close()
    assert len((await read(outbox))[0].deltas) == 10


@pytest.mark.law("Budget")
async def test_what_is_kept_for_a_router_that_does_not_read_is_bounded_by_its_sequences() -> None:
    sequences = [(f"r{number}", sample) for number in range(20) for sample in range(2)]

    def filled(times: int) -> Outbox:
        outbox = Outbox(16)
        for _ in range(times):
            outbox.put([Delta(request_id=id_, sample=sample, text="x") for id_, sample in sequences], Load())
        return outbox

    assert max(len(filled(times).drop()) for times in (*range(1, 40), 500)) <= 3 * len(sequences)
    outbox = filled(500)
    outbox.close()
    (frame,) = await read(outbox)
    texts: dict[tuple[str, int], str] = {}
    for delta in frame.deltas:
        texts[delta.request_id, delta.sample] = texts.get((delta.request_id, delta.sample), "") + delta.text
    assert texts == dict.fromkeys(sequences, "x" * 500)


@pytest.mark.parametrize("seed", range(5))
async def test_joined_deltas_say_what_they_said_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    outbox, told = Outbox(4), {}
    for name in ("a", "b"):
        parts = [
            Delta(
                request_id=name,
                sample=0,
                text=rng.choice(["", "x", "yz"]),
                token_ids=tuple(rng.choices(range(9), k=rng.randrange(3))),
                logprobs=tuple(logprob(id_) for id_ in rng.choices(range(9), k=rng.randrange(3))),
                prompt=REPORT if number == 0 else None,
                finish=DONE if number == 29 else None,
            )
            for number in range(30)
        ]
        told[name] = parts
    for pair in zip(*told.values(), strict=True):
        outbox.put(pair, Load())
    outbox.close()
    (frame,) = await read(outbox)
    assert len(frame.deltas) < 60
    for name, parts in told.items():
        found = joined([delta for delta in frame.deltas if delta.request_id == name])
        assert found.text == "".join(part.text for part in parts)
        assert found.token_ids == tuple(id_ for part in parts for id_ in part.token_ids)
        assert found.logprobs == tuple(entry for part in parts for entry in part.logprobs)
        assert found.prompt == REPORT
        assert found.finish == DONE


def test_an_error_is_kept_when_deltas_are_joined() -> None:
    error = EngineFailed("lost")
    found = joined([Delta(request_id="a", sample=1, text="x"), Delta(request_id="a", sample=1, error=error)])
    assert (found.text, found.error, found.sample) == ("x", error, 1)


async def test_bytes_grow_with_what_is_pending_and_are_none_when_it_was_read() -> None:
    outbox = Outbox(4)
    sizes = []
    for _ in range(3):
        outbox.put([Delta(request_id="a", sample=0, text="x" * 1000, logprobs=(logprob(1),) * 10)], Load())
        sizes.append(outbox.num_bytes)
    assert sizes[0] > 1000 + 10 * 200
    assert sizes == [sizes[0], 2 * sizes[0], 3 * sizes[0]]
    outbox.close()
    await read(outbox)
    assert outbox.num_bytes == 0


async def test_what_was_recorded_counts_and_stays_when_deltas_are_joined() -> None:
    recording = Recording(hidden_states=b"x" * 5000, num_states=1)
    outbox = Outbox(1)
    outbox.put([Delta(request_id="a", sample=0, text="x"), Delta(request_id="a", sample=0, text="y")], Load())
    outbox.put([Delta(request_id="a", sample=0, finish=DONE, recording=recording)], Load())
    assert outbox.num_bytes > 5000
    outbox.close()
    deltas = [delta for frame in await read(outbox) for delta in frame.deltas]
    assert "".join(delta.text for delta in deltas) == "xy"
    assert deltas[-1].recording == recording


async def test_what_was_spent_is_a_frame_of_its_own_and_a_load_alone_is_none() -> None:
    outbox, spent = Outbox(4), (Spent(flow="a", prompt_tokens=3),)
    outbox.put([], Load(num_running=1))
    outbox.put([], Load(num_running=2, spent=spent))
    outbox.put([], Load(num_running=3))
    outbox.close()
    (frame,) = await read(outbox)
    assert (frame.deltas, frame.load) == ((), Load(num_running=3, spent=spent))


async def test_a_frame_tells_of_each_flow_once_and_of_none_that_had_nothing_since_the_last() -> None:
    """However many steps it joins: what a replica spent for a flow only grows, and the last of it is all."""
    outbox = Outbox(max_deltas=100)
    for number in range(30):
        spent = (Spent(flow=f"f{number % 3}", completion_tokens=number),)
        outbox.put([Delta(request_id="r", sample=0, token_ids=(1,))], Load(num_steps=number, spent=spent))
    frames = outbox.frames()
    first = await anext(frames)
    assert {each.flow: each.completion_tokens for each in first.load.spent} == {"f0": 27, "f1": 28, "f2": 29}
    outbox.put([Delta(request_id="r", sample=0)], Load(spent=(Spent(flow="f1", completion_tokens=40),)))
    assert [each.flow for each in (await anext(frames)).load.spent] == ["f1"]


async def test_other_adapters_on_the_card_are_told_once_in_a_frame_of_their_own() -> None:
    outbox = Outbox(4)
    outbox.tell(7)
    frames = outbox.frames()
    first = await anext(frames)
    assert (first.deltas, first.adapters_revision) == ((), 7)
    outbox.put([Delta(request_id="r", sample=0)], Load())
    assert (await anext(frames)).adapters_revision == 0
