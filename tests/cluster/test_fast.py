"""`serve_app up --dashboard`: HAProxy in front and Ray's dashboard beside it tell strangers nothing."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
import ray.dashboard

from serve_app.cli.doctor.facts import Facts
from serve_app.cli.doctor.gathering import gather
from serve_app.cli.doctor.report import examine
from tests.cluster.started import Started

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="Ray has HAProxy for Linux alone"),
]
ROUTE = re.compile(r'@routes\.(get|post|put|delete|patch)\(\s*"([^"]+)"')
HEALTH = ("GET", "/api/gcs_healthz")
"""Says that it lives, and nothing else."""
FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "state",
}


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """With files and ports of HAProxy's own, beside whatever other one runs here."""
    with TemporaryDirectory(prefix="ha-") as files:  # short: the path of a unix socket is below it
        named = {variable: str(Path(files, name)) for variable, name in FILES.items()}
        settings = {"RAY_AUTH_MODE": "token", **named, **_free_ports("STATS", "METRICS")}
        run = Started(tmp_path_factory.mktemp("fast"), environment=settings, options=["--dashboard"])
        yield run
        run.end()


def _free_ports(*names: str) -> dict[str, str]:
    with ExitStack() as held:
        ports = [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in names]
    return {f"RAY_SERVE_HAPROXY_{name}_PORT": str(port) for name, port in zip(names, ports, strict=True)}


@pytest.fixture(scope="module")
def facts(fast: Started) -> Iterator[Facts]:
    """What the doctor sees of it when it serves."""
    fast.until_ready()
    with pytest.MonkeyPatch.context() as changes:
        changes.chdir(fast.folder)
        yield gather("cluster.yaml")


def test_haproxy_shows_its_statistics_to_this_machine_alone(fast: Started, facts: Facts) -> None:
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 4}
    answer = httpx.post(f"{fast.url}/v1/completions", json=body, timeout=30)
    assert answer.json()["usage"]["completion_tokens"] == 4, answer.text
    haproxys = {each.port: each.is_outside for each in facts.listeners if each.holder.program == "haproxy"}
    assert len(haproxys) == 3
    assert not any(haproxys.values())
    assert "haproxy" not in {each.check for each in examine(facts)}


def test_rays_dashboard_tells_nobody_anything_without_its_token(facts: Facts) -> None:
    """Who reached it had it run code: CVE-2023-48022, CVE-2023-48023, CVE-2025-62593, CVE-2026-32981."""
    assert set(facts.ray_answers.values()) == {401}
    assert "ray-dashboard" not in {each.check for each in examine(facts)}
    url = next(iter(facts.ray_answers)).partition("/api/")[0]
    assert facts.token is not None
    token = Path(facts.token.path).read_text(encoding="utf-8").strip()
    known = httpx.get(f"{url}/api/jobs/", headers={"authorization": f"Bearer {token}"}, timeout=30)
    assert known.status_code == 200, "it is the token that was missing"
    routes = set(routes_of_the_dashboard())
    assert {("POST", "/api/jobs/"), ("GET", "/api/v0/actors"), ("PUT", "/api/serve/applications/")} <= routes
    with httpx.Client(base_url=url, timeout=30) as client:
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
