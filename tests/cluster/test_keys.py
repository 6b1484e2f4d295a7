"""Keys through the whole service: made on the command line, asked for by HTTP, revoked while it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from tests.cluster.started import REPOSITORY, Started
from tests.cluster.test_doctor import command, findings

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="what a process belongs to is told by /proc"),
]

ACCOUNTS = "Accounts"


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


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made = House(tmp_path_factory.mktemp("house"), environment={"RAY_AUTH_MODE": "token"})
    yield made
    made.run.end()


def test_the_doctor_finds_nothing_to_mend_in_what_up_starts_with_keys(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reached Ray's dashboard had it run code: CVE-2023-48022, CVE-2023-48023, CVE-2025-62593, CVE-2026-32981."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    house.command("keys", "create", "--admin", "--days", "90")
    house.run.until_ready()
    code, found, told = findings(house.folder, house.run)
    assert found == {("pepper", "note"), ("ray-ports", "note")}, told
    assert code == 0
    for line in ("nobody without a key is answered", "nobody submits jobs", "headers are bounded"):
        assert line in command(house.folder, "doctor").stdout


def test_a_key_opens_the_door_until_it_is_revoked_and_accounts_may_die(house: House) -> None:
    admin = house.command("keys", "create", "--admin")["key"]
    house.command("tenants", "add", "acme", "--models", "demo")
    house.command("tenants", "add", "stranger", "--models", "other")
    acme, stranger = (house.command("keys", "create", name) for name in ("acme", "stranger"))
    house.run.until_ready()
    house.run.until(lambda: house.complete(acme["key"]).status_code == 200)
    refused = house.complete(None)
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    hidden, invented = (house.complete(stranger["key"], model) for model in ("demo", "nemo"))
    assert (hidden.status_code, hidden.text.replace("demo", "nemo")) == (404, invented.text)
    assert house.ask("GET", "/admin/tenants", acme["key"]).status_code == 403
    check_administration(house, admin)
    house.command("keys", "revoke", acme["id"])
    house.run.until(lambda: house.complete(acme["key"]).status_code == 401)
    check_that_routers_go_on(house, admin)
    told = house.run.said.read_text(errors="replace")
    assert all(secret[3:] not in told for secret in (admin, acme["key"], stranger["key"]))


def check_administration(house: House, admin: str) -> None:
    """What is changed by HTTP is good at once, and written down."""
    assert house.ask("POST", "/admin/tenants", admin, {"name": "beta"}).status_code == 200
    made = house.ask("POST", "/admin/keys", admin, {"tenant": "beta"}).json()
    assert house.complete(made["key"]).status_code == 200
    assert house.ask("DELETE", f"/admin/keys/{made['id']}", admin).status_code == 200
    assert house.complete(made["key"]).status_code == 401
    events = house.ask("GET", "/admin/events", admin).json()["data"]
    assert [each["action"] for each in events[-3:]] == ["add tenant", "create key", "end key"]
    assert house.ask("PATCH", "/admin/tenants/nobody", admin, {"weight": 2}).status_code == 404
    assert house.ask("POST", "/admin/tenants", admin, {"name": "a b"}).status_code == 400


def check_that_routers_go_on(house: House, admin: str) -> None:
    """Without Accounts whoever was known is let in, and Serve starts another."""
    made = house.command("keys", "create", "stranger")
    house.run.until(lambda: house.complete(made["key"], "nemo").status_code == 404)
    (accounts,) = (each for each in house.run.processes() if ACCOUNTS in each.command)
    os.kill(accounts.pid, signal.SIGKILL)
    assert [house.complete(made["key"], "nemo").status_code for _ in range(20)] == [404] * 20
    house.run.until(lambda: house.ask("GET", "/admin/keys", admin).status_code == 200)
    house.command("keys", "revoke", made["id"])
    house.run.until(lambda: house.complete(made["key"], "nemo").status_code == 401)
