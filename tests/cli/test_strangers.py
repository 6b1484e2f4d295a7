"""What a person is told where something else than a sound service answers: one line, a documented code, no fault."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from serve_app.cli.screen import Exit
from tests.cli.served import CommandLine

LENGTH = re.compile(rb"(?i)content-length: (\d+)")
OK = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"
EVENT = b'data: {"choices": [{"index": 0, "text": "one ", "delta": {"content": "one "}}]}\n\n'
LOST = b'data: {"error": {"message": "The replica went away.", "code": 500}}\n\n'
ALL = ("complete hi", "chat hi", "explain hi", "compare hi --models a,b", "models", "adapters list", "top --once")
STREAMS = ("complete hi --stream --model m", "chat hi --stream --model m")
Answer = Callable[[bytes], bytes]


def whole(kind: bytes, body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-type: %b\r\n%bcontent-length: %d\r\n\r\n"
    return head % (status, kind, more, len(body)) + body


def stream(*events: bytes, is_cut: bool = False) -> bytes:
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in events)
    return OK + b"transfer-encoding: chunked\r\n\r\n" + pieces + (b"" if is_cut else b"0\r\n\r\n")


@contextmanager
def answering(answer: bytes | Answer) -> Iterator[str]:
    """The address of something that answers every request with these bytes, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                with connection:
                    request = _read(connection)
                    if request:
                        connection.sendall(answer if isinstance(answer, bytes) else answer(request))

        worker = threading.Thread(target=serve, daemon=True)
        worker.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    worker.join(60)


def _read(connection: socket.socket) -> bytes:
    """A whole request."""
    request = b""
    while b"\r\n\r\n" not in request:
        if not (piece := connection.recv(65_536)):
            return b""
        request += piece
    head, _, body = request.partition(b"\r\n\r\n")
    length = LENGTH.search(head)
    while length and len(body) < int(length[1]):
        body += connection.recv(65_536)
    return request


@pytest.mark.parametrize("words", ALL)
@pytest.mark.parametrize(
    "answer",
    [
        whole(b"text/html", b"<h1>Welcome to nginx!</h1>"),
        whole(b"application/json", b'{"name": "another"}'),
        whole(b"application/json", b"7"),
        b"SSH-2.0-OpenSSH_9.2\r\n",
    ],
    ids=["page", "object", "number", "ssh"],
)
def test_another_program_on_the_port_is_told_as_one(run: CommandLine, words: str, answer: bytes) -> None:
    with answering(answer) as url:
        ran = run(*words.split(), "--url", url)
    assert (ran.code, ran.out) == (Exit.UNREACHABLE, "")
    assert ran.err.startswith(f"serve_app: What answers at {url} is no such service. Start one with `serve_app up`")
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize("words", STREAMS)
@pytest.mark.parametrize(
    ("answer", "code", "said", "told"),
    [
        (stream(EVENT, EVENT, is_cut=True), Exit.SERVICE_FAILED, "one one ", "broke off before its answer ended"),
        (stream(EVENT, LOST), Exit.SERVICE_FAILED, "one ", "The replica went away."),
        (stream(EVENT), Exit.SERVICE_FAILED, "one ", "broke off before its answer ended"),
        (stream(EVENT, b"data: {oops\n\n"), Exit.SERVICE_FAILED, "one ", "broke off"),
        (stream(EVENT, b'data: {"done": true}\n\n'), Exit.UNREACHABLE, "one ", "is no such service"),
    ],
    ids=["cut", "error", "no end", "no json", "no choices"],
)
def test_a_stream_that_ends_otherwise_keeps_what_it_said(
    run: CommandLine, words: str, answer: bytes, code: Exit, said: str, told: str
) -> None:
    with answering(answer) as url:
        ran = run(*words.split(), "--url", url)
    assert (ran.code, ran.out) == (code, said)
    assert told in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize("words", ALL)
@pytest.mark.parametrize(
    ("answer", "code", "told"),
    [
        (OK + b'content-length: 500\r\n\r\n{"da', Exit.SERVICE_FAILED, "broke off before its answer ended"),
        (whole(b"text/html", b"<h1>Bad Gateway</h1>", b"502 Bad Gateway"), Exit.SERVICE_FAILED, "with status 502. It"),
    ],
    ids=["cut", "gateway"],
)
def test_half_an_answer_and_one_of_a_proxy_are_told(
    run: CommandLine, words: str, answer: bytes, code: Exit, told: str
) -> None:
    with answering(answer) as url:
        ran = run(*words.split(), "--url", url)
    assert (ran.code, ran.out) == (code, "")
    assert told in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal is a pair of files")
def test_at_a_terminal_why_a_stream_ended_stands_on_a_line_of_its_own() -> None:
    ours, theirs = os.openpty()
    with answering(stream(EVENT, is_cut=True)) as url:
        command = [sys.executable, "-m", "serve_app", "complete", "hi", "--model", "m", "--url", url]
        ran = subprocess.run(command, stdin=theirs, stdout=theirs, stderr=theirs, timeout=120)
    os.close(theirs)
    written = os.read(ours, 65_536).decode()
    os.close(ours)
    assert ran.returncode == Exit.SERVICE_FAILED
    assert written.startswith(f"one \r\nserve_app: {url} broke off")


def test_who_asks_while_models_load_is_told_so(run: CommandLine) -> None:
    def loads(request: bytes) -> bytes:
        if request.startswith(b"GET /health"):
            return whole(b"application/json", b'{"status": "loading", "models": ["demo"]}', b"503 Wait")
        return whole(b"application/json", b'{"object": "list", "data": []}')

    with answering(loads) as url:
        ran = run("complete", "hi", "--url", url)
    assert ran.code == Exit.SERVICE_FAILED
    assert ran.err == "serve_app: No model is ready yet: demo is loading. Try again in a moment.\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--url", "http://[::1"], "is no address of a service: Invalid IPv6 URL"),
        (["--url", "http://127.0.0.1:99999"], "is no address of a service: Port out of range"),
        (["--key", "sa-\nsecret"], "The key has characters that no key has"),
    ],
)
def test_an_address_or_a_key_that_cannot_be_is_a_misuse(run: CommandLine, words: list[str], told: str) -> None:
    ran = run("models", *words)
    assert (ran.code, ran.out) == (Exit.MISUSED, "")
    assert told in ran.err
    assert "secret" not in ran.err


@pytest.mark.parametrize(
    ("shell", "code", "told"),
    [
        ("--version", Exit.DONE, ""),
        ("env >&-", Exit.DONE, ""),
        ("env <&-", Exit.DONE, ""),
        ("models --url http://127.0.0.1:1 2>&-", Exit.UNREACHABLE, ""),
        ("env > /dev/full", Exit.FAILED, "serve_app: [Errno 28] No space left on device\n"),
        ("models --url 'http://ünïcödé'", Exit.UNREACHABLE, "serve_app: No service answers at http://\\xfcn"),
    ],
)
def test_streams_that_are_closed_full_or_narrow_are_no_fault(shell: str, code: Exit, told: str) -> None:
    ran = subprocess.run(
        ["sh", "-c", f"PYTHONIOENCODING=ascii {sys.executable} -m serve_app {shell}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stderr[: len(told)] if told else ran.stderr) == (code, told)
