"""A client knows its service and its key by the environment, and says where there is nothing to ask."""

from __future__ import annotations

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
