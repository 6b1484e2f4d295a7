"""A client knows its service and its key by the environment, and says where there is nothing to ask."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import httpx2
import pytest

from serve_app.lab.client import KEY_VARIABLES, NO_KEY, Client
from serve_app.lab.errors import ServiceError


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


def test_without_the_extra_an_import_says_how_to_get_it() -> None:
    """pandas is hidden from a new interpreter, as where the extra was not installed."""
    source = "import sys; sys.modules['pandas'] = None; import serve_app.lab"
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert "serve_app.lab needs pandas" in ended.stderr
    assert "pip install -e '.[lab]'" in ended.stderr
