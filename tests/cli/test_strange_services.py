"""What answers may be no service of ours, break off anywhere, lead elsewhere, or write what a terminal would obey."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import pytest

from serve_app.cli.screen import Exit
from tests.cli.served import CommandLine

ASK = ("complete", "hello", "--model", "demo")
STEERING = "\x9b31m\u202e\x1b[2J\ud800"


@dataclass(slots=True)
class Strange:
    """Answers every request with the same bytes and closes. heads: of the requests that came"""

    listener: socket.socket
    answer: bytes
    heads: list[bytes] = field(default_factory=list)
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                self.heads.append(connection.recv(65536))
                connection.sendall(self.answer)


@contextmanager
def answering(answer: bytes) -> Iterator[Strange]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        strange = Strange(listener, answer)
        thread = threading.Thread(target=strange.run, daemon=True)
        thread.start()
        yield strange
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def head(status: str, *lines: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "connection: close", "", ""]).encode()


def whole(status: str, content: object) -> bytes:
    body = json.dumps(content).encode()
    return head(status, "content-type: application/json", f"content-length: {len(body)}") + body


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ((*ASK, "--stream"), head("200 OK") + b'data: {"choices": [{"te'),
        ((*ASK, "--stream"), head("200 OK") + b"data: {\xc3"),
        ((*ASK, "--stream"), head("200 OK") + b"data: 7\n\n"),
        ((*ASK, "--stream"), head("200 OK", "transfer-encoding: chunked") + b"20\r\ndata: {"),
        (ASK, head("200 OK", "content-length: 100") + b'{"choices": []}'),
        (ASK, head("500 Internal Server Error", "content-length: 100") + b"{"),
        (("top", "--once"), head("200 OK", "content-length: 100") + b"# TYPE"),
    ],
)
def test_an_answer_that_breaks_off_anywhere_is_told_as_that(
    run: CommandLine, words: tuple[str, ...], answer: bytes
) -> None:
    with answering(answer) as strange:
        ran = run(*words, "--url", strange.url)
    assert (ran.code, "broke off" in ran.err) == (Exit.SERVICE_FAILED, True), ran.err


@pytest.mark.parametrize("content", [{}, [], {"data": 7}])
def test_what_is_no_service_of_ours_is_told_as_that(run: CommandLine, content: object) -> None:
    with answering(whole("200 OK", content)) as strange:
        ran = run("models", "--url", strange.url)
    assert (ran.code, "no such service" in ran.err, strange.url in ran.err) == (Exit.UNREACHABLE, True, True)


@pytest.mark.parametrize("status", ["301 Moved Permanently", "302 Found", "307 Temporary Redirect"])
@pytest.mark.parametrize("words", [("models",), ASK])
def test_a_key_is_not_taken_along_to_where_a_service_leads(
    run: CommandLine, words: tuple[str, ...], status: str
) -> None:
    with answering(whole("200 OK", {"data": []})) as other:
        with answering(head(status, f"location: {other.url}/elsewhere", "content-length: 0")) as strange:
            ran = run(*words, "--url", strange.url, "--key", "sk-secret")
        assert b"Bearer sk-secret" in strange.heads[0]
        assert other.heads == []
    assert (ran.code, f"{other.url}/elsewhere" in ran.err) == (Exit.REFUSED, True)


def test_nothing_that_a_service_writes_steers_the_terminal(run: CommandLine) -> None:
    with answering(whole("400 Bad Request", {"error": {"message": STEERING}})) as strange:
        refused = run(*ASK, "--url", strange.url)
    answer = {"choices": [{"index": 0, "text": STEERING, "finish_reason": "stop"}]}
    with answering(whole("200 OK", answer)) as strange:
        told = run(*ASK, "--json", "--url", strange.url)
    assert (refused.code, told.code) == (Exit.REFUSED, Exit.DONE)
    assert told.json == answer
    assert not set("\x9b\u202e\x1b\ud800") & set(refused.err + told.out)
