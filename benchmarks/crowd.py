"""Many clients in one process that costs little: raw sockets, one epoll, no more parsing than it takes.

Run as a process of its own by `bench_overload.py`, whose clients would otherwise compete with what they measure.
"""

from __future__ import annotations

import heapq
import select
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

END_OF_HEAD = b"\r\n\r\n"


class Answer(NamedTuple):
    """is_early: the request was sent before the Retry-After of the last refusal was over"""

    kind: str
    asked_at: float
    seconds: float
    retry_after_s: int
    is_early: bool


@dataclass(slots=True, eq=False)
class Client:
    """One connection's closed loop."""

    request: bytes
    socket: socket.socket | None = None
    received: bytes = b""
    asked_at: float = 0.0
    may_come_at: float = 0.0


@dataclass(slots=True)
class Crowd:
    """obeys: whether a client that is refused waits for its Retry-After or comes again at once"""

    address: tuple[str, int]
    request_of: Callable[[int], bytes]
    num_clients: int
    obeys: bool
    answers: list[Answer] = field(default_factory=list)
    num_lost: Counter[str] = field(default_factory=Counter)
    _clients: dict[int, Client] = field(default_factory=dict)
    _asleep: list[tuple[float, int, Client]] = field(default_factory=list)
    _poll: select.epoll = field(default_factory=select.epoll)

    def run(self, duration_s: float) -> None:
        """What is under way at the end is given up."""
        ends_at = time.monotonic() + duration_s
        for number in range(self.num_clients):
            self._connect(Client(self.request_of(number)))
        while (now := time.monotonic()) < ends_at:
            while self._asleep and self._asleep[0][0] <= now:
                self._ask(heapq.heappop(self._asleep)[2])
            until = min(ends_at, self._asleep[0][0]) if self._asleep else ends_at
            for number, events in self._poll.poll(max(0.0, until - now)):
                self._serve(self._clients[number], events)
        for client in self._clients.values():
            if client.socket is not None:
                client.socket.close()

    def _connect(self, client: Client) -> None:
        client.socket = socket.socket()
        client.socket.setblocking(False)
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.socket.connect_ex(self.address)
        self._clients[client.socket.fileno()] = client
        self._poll.register(client.socket, select.EPOLLOUT)

    def _serve(self, client: Client, events: int) -> None:
        assert client.socket is not None
        if events & select.EPOLLOUT:
            self._poll.modify(client.socket, select.EPOLLIN)
            self._ask(client)
            return
        try:
            data = client.socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._lose(client, "connection lost")
            return
        client.received += data
        end = client.received.find(END_OF_HEAD)
        if end >= 0:
            self._take(client, client.received[:end].lower(), client.received[end + 4 :])

    def _take(self, client: Client, head: bytes, body: bytes) -> None:
        if len(body) < int(_value(head, b"content-length") or 0):
            return
        now = time.monotonic()
        retry_after_s = int(_value(head, b"retry-after") or 0)
        is_early = client.asked_at < client.may_come_at
        self.answers.append(
            Answer(
                kind=_kind(head, body), asked_at=client.asked_at, seconds=now - client.asked_at,
                retry_after_s=retry_after_s, is_early=is_early,
            )
        )  # fmt: skip
        client.received = b""
        client.may_come_at = now + retry_after_s
        if _value(head, b"connection") == b"close":
            self._lose(client, "connection closed behind an answer")
        elif retry_after_s and self.obeys:
            heapq.heappush(self._asleep, (client.may_come_at, id(client), client))
        else:
            self._ask(client)

    def _ask(self, client: Client) -> None:
        client.asked_at = time.monotonic()
        assert client.socket is not None
        try:
            client.socket.send(client.request)
        except OSError:
            self._lose(client, "connection lost")

    def _lose(self, client: Client, how: str) -> None:
        self.num_lost[how] += 1
        assert client.socket is not None
        self._poll.unregister(client.socket)
        del self._clients[client.socket.fileno()]
        client.socket.close()
        client.received = b""
        self._connect(client)


def _value(head: bytes, name: bytes) -> bytes:
    """Of a header; empty where it is not there."""
    _, found, rest = head.partition(b"\r\n" + name + b":")
    return rest.partition(b"\r\n")[0].strip() if found else b""


def _kind(head: bytes, body: bytes) -> str:
    """`ok`, a refusal of our own with all that belongs to it, or what was missing."""
    status = head[9:12].decode()
    if status == "200":
        return "ok"
    code = body.partition(b'"error_code":"')[2].partition(b'"')[0].decode()
    if not code:
        return f"{status} without an envelope: {body[:60]!r}"
    return f"{status} {code}" + ("" if b"\r\nretry-after:" in head else " without Retry-After")
