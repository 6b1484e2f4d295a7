"""`serve_app up --dashboard` with keys from its start to its end: what it answers, where it listens, what stays behind.

Its other ends are beside those whose clusters may end in other ways: `test_doctor`, `test_exact`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray.dashboard

from serve_app.cli.doctor.gathering import Facts, gather, open_logs
from serve_app.cli.processes import listener_on
from tests.cluster.house import House
from tests.cluster.started import TIMEOUT_S, Started
from tests.cluster.test_doctor import command, findings

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="what a process belongs to is told by /proc"),
]

ACCOUNTS = "Accounts"
LISTENING = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 as the kernel writes them."""
ROUTE = re.compile(r'@routes\.(get|post|put|delete|patch)\(\s*"([^"]+)"')
HEALTH = ("GET", "/api/gcs_healthz")
"""Says that it lives, and nothing else."""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made = House(tmp_path_factory.mktemp("house"), environment={"RAY_AUTH_MODE": "token"}, options=["--dashboard"])
    yield made
    made.run.end()


@pytest.fixture(scope="module")
def facts(house: House) -> Facts:
    """What the doctor sees of it when it serves."""
    house.run.until_ready()
    with pytest.MonkeyPatch.context() as changes:
        changes.chdir(house.folder)
        return gather("cluster.yaml")


def test_the_doctor_finds_nothing_to_mend_in_what_up_starts_with_keys(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    house.command("keys", "create", "--admin", "--days", "90")
    house.run.until_ready()
    code, found, told = findings(house.folder, house.run)
    assert found == {("pepper", "note"), ("ray-ports", "note")}, told
    assert code == 0
    said = command(house.folder, "doctor").stdout
    assert "nobody without a key is answered" in said


def test_haproxy_shows_its_statistics_to_this_machine_alone(facts: Facts) -> None:
    haproxys = {each.port: each.is_outside for each in facts.listeners if each.holder.program == "haproxy"}
    assert len(haproxys) == 3
    assert not any(haproxys.values())


def test_rays_dashboard_tells_nobody_anything_without_its_token(facts: Facts) -> None:
    """Who reached it had it run code: CVE-2023-48022, CVE-2023-48023, CVE-2025-62593, CVE-2026-32981."""
    assert set(facts.ray_answers.values()) == {401}
    url = next(iter(facts.ray_answers)).partition("/api/")[0]
    assert facts.token is not None
    token = Path(facts.token.path).read_text(encoding="utf-8").strip()
    known = httpx.get(f"{url}/api/jobs/", headers={"authorization": f"Bearer {token}"}, timeout=TIMEOUT_S)
    assert known.status_code == 200, "it is the token that was missing"
    routes = set(routes_of_the_dashboard())
    assert {("POST", "/api/jobs/"), ("GET", "/api/v0/actors"), ("PUT", "/api/serve/applications/")} <= routes
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        for headers in ({}, {"authorization": "Bearer x"}):
            answered = {(method, path): client.request(method, path, headers=headers) for method, path in routes}
            let_in = {route: each.status_code for route, each in answered.items() if each.status_code not in (401, 403)}
            assert let_in == {HEALTH: 200}


def routes_of_the_dashboard() -> Iterator[tuple[str, str]]:
    """Method and path of all that Ray's own modules register there, with a name that nothing has for each name."""
    modules = Path(ray.dashboard.__file__).parent / "modules"
    for file in modules.rglob("*_head.py"):
        for method, path in ROUTE.findall(file.read_text(encoding="utf-8")):
            yield method.upper(), re.sub(r"\{.*?\}", "nothing", path)


def test_a_key_opens_the_door_until_it_is_revoked_and_accounts_may_die(house: House) -> None:
    admin = house.command("keys", "create", "--admin")["key"]
    house.command("tenants", "add", "acme", "--models", "demo")
    house.command("tenants", "add", "stranger", "--models", "other")
    acme, stranger = (house.command("keys", "create", name) for name in ("acme", "stranger"))
    house.run.until_ready()
    house.run.until(lambda: house.complete(acme["key"]).status_code == 200)
    page = httpx.get(house.run.url, headers={"accept": "text/html"}, follow_redirects=True, timeout=TIMEOUT_S)
    assert (page.status_code, str(page.url)) == (200, f"{house.run.url}/console"), page.text
    assert f"\n  {house.run.url}/console\n" in house.run.said.read_text(errors="replace")
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


def test_it_serves_the_demo_on_loopback_and_a_ctrl_c_leaves_nothing_behind(house: House) -> None:
    """The last test of this house."""
    started = house.run
    house.command("tenants", "add", "guest", "--models", "demo")
    key = house.command("keys", "create", "guest")["key"]
    started.until_ready()
    started.until(lambda: house.complete(key).status_code == 200)
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 4}
    response = house.ask("POST", "/v1/completions", key, body)
    assert response.json()["usage"]["completion_tokens"] == 4, response.text
    assert "Starting Ray with RAY_memory_monitor_refresh_ms, " in started.said.read_text(errors="replace")
    eager = [each for each in started.processes() if _oom_score(each.pid) > _oom_score(os.getpid())]
    assert eager == [], "the kernel would take them before any other process"
    assert _statuses_beside_another(house, key, body) == [503, 200], (
        "the router takes one at a time, and counts it out again"
    )
    large = httpx.get(f"{started.url}/health", headers={"large": "x" * 20_000}, timeout=TIMEOUT_S)
    assert large.status_code == 400, "HAProxy bounds headers"
    assert list(open_logs(started.processes())) == [], "others may read what Ray and the replicas write"
    assert started.processes(), "and these write it"
    outside = [each.command for each in started.processes() if _listens_outside(each.pid)]
    assert {command.split(":")[2] for command in outside} <= {"ServeReplica"}, "Serve binds those, and wants a token"
    assert [line for line in _told_by_proxies(started) if "POST" in line] == [], "the file has no access log"
    long = {"model": "demo", "prompt": "Once", "n": 16, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    headers, ended = {"authorization": f"Bearer {key}"}, ""
    with httpx.stream("POST", f"{started.url}/v1/completions", headers=headers, json=long, timeout=TIMEOUT_S) as stream:
        for piece in stream.iter_text():
            if not ended:
                started.process.send_signal(signal.SIGINT)
            ended += piece
    assert started.process.wait(TIMEOUT_S) == 0
    error, done = ended.strip().split("\n\n")[-2:]
    assert (json.loads(error.removeprefix("data: "))["error"]["error_code"], done) == ("unavailable", "data: [DONE]")
    assert started.processes() == []
    assert listener_on(started.port) is None


def _statuses_beside_another(house: House, key: str, body: dict[str, Any]) -> list[int]:
    """Of a completion while another one's body is awaited, and after that."""
    head = ["POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", "Content-Length: 100"]
    with socket.create_connection(("127.0.0.1", house.run.port)) as other:
        other.sendall("\r\n".join([*head, "", ""]).encode())
        refused = _until_other_than(200, house, key, body)
        assert refused.json()["error"]["error_code"] == "overloaded"
        assert "as may be at once (1)" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
    return [refused.status_code, _until_other_than(503, house, key, body).status_code]


def _until_other_than(status: int, house: House, key: str, body: dict[str, Any]) -> httpx.Response:
    """Each on a connection of its own, so that none is left unread."""
    answers: list[httpx.Response] = []

    def is_other() -> bool:
        answers.append(house.ask("POST", "/v1/completions", key, body))
        return answers[-1].status_code != status

    house.run.until(is_other)
    return answers[-1]


def _told_by_proxies(started: Started) -> list[str]:
    """Lines of the files that Serve's proxies log to."""
    proxies = [each.pid for each in started.processes() if each.command.startswith("ray::ProxyActor")]
    assert proxies
    opened = {os.readlink(path) for pid in proxies for path in Path(f"/proc/{pid}/fd").iterdir()}
    files = [Path(path) for path in opened if "/logs/serve/proxy_" in path]
    assert files
    return [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def _oom_score(pid: int) -> int:
    """What the kernel adds to a process's size when it looks for one to kill."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def _listens_outside(pid: int) -> bool:
    """Whether the process has a TCP socket that listens on more than loopback."""
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path("/proc/net", table).read_text().splitlines()[1:]]
    outside = {
        f"socket:[{row[9]}]" for row in rows if row[3] == LISTENING and row[1].rpartition(":")[0] not in LOOPBACK
    }
    return bool(outside & {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()})
