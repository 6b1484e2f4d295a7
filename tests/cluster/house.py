"""A service that asks for keys, started by `serve_app up`, and its command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from tests.cluster.started import REPOSITORY, Started


def with_keys(content: dict[str, Any]) -> None:
    (router,) = (each for each in content["applications"] if each["name"] == "router")
    router["args"]["store"] = "sqlite:///kept.db"
    router["deployments"][0]["user_config"]["auth"] = "keys"


class House:
    """A running service and its command line."""

    def __init__(
        self,
        folder: Path,
        change: Callable[[dict[str, Any]], object] = with_keys,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        self.run = Started(folder, change, environment)

    def command(self, *words: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "serve_app", *words, "--json"],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            check=False,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def ask(self, method: str, path: str, key: str | None, body: object = None) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.request(method, f"{self.run.url}{path}", headers=headers, json=body, timeout=30)

    def complete(self, key: str | None, model: str = "demo") -> httpx.Response:
        return self.ask("POST", "/v1/completions", key, {"model": model, "prompt": "Once", "max_tokens": 2})

    def check_known(self, key: str) -> None:
        """A key that was made just now is good at every router, of which each request asks another."""
        assert {self.ask("GET", "/v1/models", key).status_code for _ in range(10)} == {200}
