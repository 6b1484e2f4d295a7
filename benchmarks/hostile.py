"""Neighbours that mean no good, each a process of its own that goes on until it is told to stop."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

from benchmarks.poison import HUGE, POISONED_TOKEN, SELECTIVE, SPARE

Body = dict[str, Any]
SMALL_BUFFER = 4096
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The service and what of the model the requests depend on; `ids` are tokens that prompts are drawn from."""

    port: int
    model: str
    context: int
    ids: int

    def prompt(self, number: int, length: int) -> list[int]:
        """A prompt that no other number gives, as long as the context allows."""
        drawn = random.Random(number)
        return [drawn.randrange(3, self.ids) for _ in range(min(length, self.context - 64))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """Requests that are sent together, again and again when all of them are answered.

    body:    of the request of that number
    is_read: whether the answers are read
    """

    body: Callable[[Target, int], Body]
    at_once: int = 1
    is_read: bool = True


FLAT: tuple[Body, ...] = ({"top_p": 0.9}, {"typical_p": 0.5}, {"xtc_probability": 0.5, "xtc_threshold": 1e-6})


def adapted(name: str, prompt: Callable[[Target, int], object], max_tokens: int) -> Callable[[Target, int], Body]:
    return lambda target, number: {
        "model": f"{target.model}:{name}", "prompt": prompt(target, number), "max_tokens": max_tokens, "temperature": 0,
    }  # fmt: skip


def prompted(length: int, **rest: Any) -> Callable[[Target, int], Body]:
    return lambda target, number: {"prompt": target.prompt(number, length), "max_tokens": 16, **rest}


def long_text(target: Target, number: int) -> Body:
    """As long as a prompt may be; words, so that it is cut into as many pieces."""
    return {"prompt": f"{number} " + "the quick brown fox " * ((4_000_000 - 10) // 20), "max_tokens": 1}


def short_of_slots(target: Target, number: int) -> Body:
    return adapted(SPARE[number % len(SPARE)], lambda t, n: t.prompt(n, 16), 8)(target, number)


def flat(target: Target, number: int) -> Body:
    setting = FLAT[number % len(FLAT)]
    return {"prompt": target.prompt(number, 8), "max_tokens": 64, "temperature": 2, "ignore_eos": True, **setting}


def unread(target: Target, number: int) -> Body:
    return {"prompt": target.prompt(number, 8), "max_tokens": 1500, "ignore_eos": True, "stream": True}


def many_choices(target: Target, number: int) -> Body:
    prompts = [target.prompt(2 * number, 2000), target.prompt(2 * number + 1, 2000)]
    return {"prompt": prompts, "n": 128, "max_tokens": 16}


ATTACKS: dict[str, Attack] = {
    "a huge adapter": Attack(body=adapted(HUGE, lambda t, n: t.prompt(n, 8), 8), at_once=4),
    "b rows of NaN": Attack(body=adapted(SELECTIVE, lambda t, n: [POISONED_TOKEN] * 8, 8), at_once=4),
    "c 4M characters": Attack(body=long_text),
    "c 4M characters x10": Attack(body=long_text, at_once=10),
    "d 4000 tokens": Attack(body=prompted(4000)),
    "d 4000 tokens x4": Attack(body=prompted(4000), at_once=4),
    "d whole context": Attack(body=prompted(10**9)),
    "e short of slots": Attack(body=short_of_slots, at_once=12),
    "f flat logits": Attack(body=flat, at_once=24),
    "g 600 unread streams": Attack(body=unread, at_once=600, is_read=False),
    "h n=128": Attack(body=many_choices),
}


@contextmanager
def neighbour(name: str, target: Target) -> Iterator[tuple[Event, Counter[str]]]:
    """A neighbour that is ready, and begins when the event is set. Its answers are counted when the block has ended."""
    context = multiprocessing.get_context("spawn")
    ready, begins, stops = context.Event(), context.Event(), context.Event()
    answers: Counter[str] = Counter()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(name, target, ready, begins, stops, sender), daemon=True)
    process.start()
    assert ready.wait(READY_TIMEOUT_S), f"{name} does not get ready"
    try:
        yield begins, answers
    finally:
        begins.set()
        stops.set()
        if receiver.poll(STOP_TIMEOUT_S):
            answers.update(receiver.recv())
        process.terminate()
        process.join()


def _run(name: str, target: Target, ready: Event, begins: Event, stops: Event, sender: Any) -> None:
    attack = ATTACKS[name]
    first = [_request(target, attack.body(target, number)) for number in range(attack.at_once)]
    ready.set()
    begins.wait()
    sender.send(asyncio.run(_attack_until(stops, attack, target, first)))


async def _attack_until(stops: Event, attack: Attack, target: Target, first: list[bytes]) -> Counter[str]:
    answers: Counter[str] = Counter()
    task = asyncio.create_task(_attack(attack, target, first, answers))
    while not stops.is_set():
        await asyncio.sleep(PAUSE_S)
        if task.done():
            task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return answers


async def _attack(attack: Attack, target: Target, first: list[bytes], answers: Counter[str]) -> None:
    requests, number = first, attack.at_once
    while True:
        await asyncio.gather(*(_send(target, request, answers, is_read=attack.is_read) for request in requests))
        await asyncio.sleep(PAUSE_S)
        if attack.is_read:
            requests = [_request(target, attack.body(target, number + i)) for i in range(attack.at_once)]
            number += attack.at_once


async def _send(target: Target, request: bytes, answers: Counter[str], *, is_read: bool) -> None:
    """One request on a connection of its own; what is not read stays open for good."""
    with socket.socket() as connection:
        connection.setblocking(False)
        if not is_read:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(connection, ("127.0.0.1", target.port))
            await loop.sock_sendall(connection, request)
            if not is_read:
                answers["opened"] += 1
                await asyncio.Event().wait()
            head = await loop.sock_recv(connection, 65536)
            answers[head[9:12].decode() or "cut"] += 1
            while await loop.sock_recv(connection, 65536):
                pass
        except OSError as error:  # a connection that is refused or reset is an answer, too, and others go on
            answers[type(error).__name__] += 1


def _request(target: Target, body: Body) -> bytes:
    content = json.dumps({"model": target.model, **body}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content
