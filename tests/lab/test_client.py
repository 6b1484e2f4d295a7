"""A client knows its service and its key by the environment, and says where there is nothing to ask."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest

from serve_app.cli.screen import KEY_VARIABLES
from serve_app.lab.client import NO_KEY, Client
from serve_app.lab.errors import ServiceError
from serve_app.lab.wire import Wire


@pytest.fixture(autouse=True)
def nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return iter(())


@pytest.mark.parametrize(
    ("said", "key"),
    [({}, NO_KEY), ({KEY_VARIABLES[1]: "b"}, "b"), (dict(zip(KEY_VARIABLES, "ab", strict=True)), "a")],
)
def test_a_key_is_what_the_command_line_would_send(
    said: dict[str, str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    sent: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(request.headers["authorization"])
        return httpx2.Response(200, json={"object": "list", "data": []})

    client = Client(http_client=httpx2.AsyncClient(transport=httpx2.MockTransport(answer)))
    with pytest.raises(ServiceError, match="No model is served to this key"):
        client.complete("Once")
    client.close()
    assert sent == [f"Bearer {key}"]


async def test_a_stream_that_breaks_off_is_fetched_from_where_it_was_and_ends_with_its_reader() -> None:
    def event(text: str, last_id: str) -> bytes:
        content = {"id": "cmpl-a/b?c d", "choices": [{"index": 0, "text": text, "finish_reason": None}]}
        return f"id: {last_id}\ndata: {json.dumps(content)}\n\n".encode()

    class Pieces(httpx2.AsyncByteStream):
        is_closed = False

        async def __aiter__(self) -> AsyncIterator[bytes]:
            if len(asked) == 1:
                yield event("one ", "4.1") + event("two", "7.2")[:-5]
                raise httpx2.ReadError("reset")
            yield event("two", "7.2") + event("three", "12.3")

        async def aclose(self) -> None:
            self.is_closed = True

    asked: list[httpx2.Request] = []
    pieces = Pieces()

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        pieces.is_closed = False
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=pieces)

    wire = Wire("http://service", "a", httpx2.AsyncClient(transport=httpx2.MockTransport(answer)))
    chunks = wire.chunks("completions", {"model": "demo", "prompt": "Once"})
    texts = [(await anext(chunks))["choices"][0]["text"] for _ in range(2)]
    await chunks.aclose()
    assert (texts, pieces.is_closed) == (["one ", "two"], True)
    assert (asked[1].method, asked[1].url.raw_path) == ("GET", b"/v1/completions/cmpl-a%2Fb%3Fc%20d")
    assert asked[1].headers["last-event-id"] == "4.1"
    await wire.close()


def test_without_the_extra_an_import_says_how_to_get_it() -> None:
    """pandas is hidden from a new interpreter, as where the extra was not installed."""
    source = "import sys; sys.modules['pandas'] = None; import serve_app.lab"
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert "serve_app.lab needs pandas" in ended.stderr
    assert "pip install -e '.[lab]'" in ended.stderr
