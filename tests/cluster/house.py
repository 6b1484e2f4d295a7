"""A service that asks for keys, started by `serve_app up`, and its command line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import yaml
from sqlalchemy import URL, make_url

from serve_app.cli import main
from serve_app.tenants.store import file_of
from tests.cluster.started import TIMEOUT_S, Started

NUM_ASKED = 24
"""Requests, one after the other, that both of two routers and both of two replicas get some of."""


def router_of(content: dict[str, Any]) -> dict[str, Any]:
    (router,) = (each for each in content["applications"] if each["name"] == "router")
    return router


def with_keys(content: dict[str, Any]) -> None:
    router = router_of(content)
    router["args"]["store"] = "sqlite:///kept.db"
    router["deployments"][0]["user_config"]["auth"] = "keys"


class House:
    """A running service and its command line."""

    def __init__(
        self,
        folder: Path,
        change: Callable[[dict[str, Any]], object] = with_keys,
        environment: Mapping[str, str] = MappingProxyType({}),
        options: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.run = Started(folder, change, environment, options)

    @property
    def store(self) -> URL:
        """As its cluster file names it, and good in any folder."""
        url = make_url(router_of(yaml.safe_load((self.folder / "cluster.yaml").read_text()))["args"]["store"])
        file = file_of(url)
        return url if file is None else url.set(database=str(self.folder / file))

    def command(self, *words: str) -> dict[str, Any]:
        """What it answers. It runs here, one at a time: a process of its own would import everything anew."""
        said, wrong = io.StringIO(), io.StringIO()
        with chdir(self.folder), redirect_stdout(said), redirect_stderr(wrong):
            code = main([*words, "--json"])
        assert code == 0, wrong.getvalue()
        answer: dict[str, Any] = json.loads(said.getvalue())
        return answer

    def ask(self, method: str, path: str, key: str | None, body: object = None) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.request(method, f"{self.run.url}{path}", headers=headers, json=body, timeout=TIMEOUT_S)

    def complete(self, key: str | None, model: str = "demo") -> httpx.Response:
        return self.ask("POST", "/v1/completions", key, {"model": model, "prompt": "Once", "max_tokens": 2})

    def check_known(self, key: str) -> None:
        """A key that was made just now is good at every router, of which each request asks another."""
        assert {self.ask("GET", "/v1/models", key).status_code for _ in range(10)} == {200}
