"""What answers may be no service of ours, break off anywhere, lead elsewhere, or write what a terminal would obey."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import pytest

from serve_app.cli.client import Service
from serve_app.cli.screen import Exit
from serve_app.core.errors import Unavailable
from tests.cli.served import CommandLine

ASK = ("complete", "hello", "--model", "demo")
STEERING = "\x9b31m\u202e\x1b[2J\ud800"


@dataclass(slots=True)
class Strange:
    """Answers a request with the next of some bytes, in the end always with the last of them, and closes.

    heads: of the requests that came
    """

    listener: socket.socket
    answers: tuple[bytes, ...]
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
                connection.sendall(self.answers[min(len(self.heads), len(self.answers)) - 1])


@contextmanager
def answering(*answers: bytes) -> Iterator[Strange]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        strange = Strange(listener, answers)
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


def test_a_stream_that_breaks_off_is_fetched_from_where_it_was(run: CommandLine) -> None:
    def event(text: str, last_id: str) -> bytes:
        content = {"id": "cmpl-a/b?c d", "choices": [{"index": 0, "text": text, "finish_reason": None}]}
        return f"id: {last_id}\ndata: {json.dumps(content)}\n\n".encode()

    begun = head("200 OK") + event("one ", "4.1") + event("two", "7.2")[:-5]
    rest = head("200 OK") + event("two", "7.2") + b"data: [DONE]\n\n"
    with answering(begun, head("503 Service Unavailable", "content-length: 0"), rest) as strange:
        ran = run(*ASK, "--stream", "--url", strange.url)
    assert (ran.code, ran.out.strip()) == (Exit.DONE, "one two"), ran.err
    for asked in strange.heads[1:]:
        assert asked.startswith(b"GET /v1/completions/cmpl-a%2Fb%3Fc%20d HTTP/1.1\r\n")
        assert b"\r\nlast-event-id: 4.1\r\n" in asked.lower()


@pytest.mark.parametrize(("words", "num_sent"), [(ASK, 2), (("adapters", "rollback", "demo:pirate"), 1)])
def test_what_may_have_changed_something_is_not_sent_again(
    run: CommandLine, words: tuple[str, ...], num_sent: int
) -> None:
    with answering(b"") as strange:
        ran = run(*words, "--url", strange.url)
    assert (ran.code, len(strange.heads)) == (Exit.UNREACHABLE, num_sent), ran.err


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


def test_a_line_of_a_batch_is_not_answered_by_a_proxy_that_knows_no_router() -> None:
    own = json.dumps({"error": {"message": "No such model."}}).encode()
    with answering(head("404 Not Found") + b"Path not found.", head("404 Not Found") + own) as strange:
        service = Service(url=strange.url)
        with pytest.raises(Unavailable, match="404"):
            service.answered("/v1/completions", {})
        assert service.answered("/v1/completions", {}).status == 404
