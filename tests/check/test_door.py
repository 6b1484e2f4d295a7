"""`serve_app check` lets nobody serve a door that is open to others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from serve_app.check.cluster_file import Report, check_file
from serve_app.check.ray_environment import HAPROXY, haproxy_program, is_behind_haproxy
from serve_app.cli import main

ROUTER = "serve_app.deployments.apps:router"
KEYS = {"args": {"store": "sqlite:///kept.db"}}
PLAIN, BEHIND_HAPROXY = {HAPROXY: "0"}, {HAPROXY: "1"}
TLS = {"host": "127.0.0.1", "ssl_certfile": "/cert.pem", "ssl_keyfile": "/key.pem"}


def application(*, auth: str | None = None, **changes: object) -> dict[str, object]:
    config = {} if auth is None else {"user_config": {"auth": auth}}
    deployments = [{"name": "Router", "num_replicas": 1, **config}]
    fields = {"name": "router", "route_prefix": "/", "import_path": ROUTER, "args": {}, "deployments": deployments}
    return {**fields, **changes}


@pytest.fixture
def report_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    monkeypatch.chdir(tmp_path)

    def check(
        *applications: dict[str, object],
        environment: Mapping[str, str] = PLAIN,
        **content: object,
    ) -> Report:
        Path("cluster.yaml").write_text(yaml.safe_dump({**content, "applications": list(applications)}))
        return check_file("cluster.yaml", environment=environment)

    return check


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "service.example.org", "0"])
@pytest.mark.parametrize("auth", [None, "none"])
def test_a_host_that_others_reach_is_refused_by_name_where_nobody_is_asked_for_a_key(
    report_of: Callable[..., Report], host: str, auth: str | None
) -> None:
    report = report_of(application(auth=auth), http_options={"host": host})
    assert not report.is_sound
    assert any("error: http_options.host:" in line and "asks for no key" in line for line in report.lines)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_keys(report_of: Callable[..., Report], host: str) -> None:
    report = report_of(application(auth="none"), http_options={"host": host})
    assert report.is_sound, report.lines


@pytest.mark.parametrize("auth", [None, "keys"])
def test_a_door_with_keys_may_be_anywhere_and_is_told_of_what_else_it_wants(
    report_of: Callable[..., Report], auth: str | None
) -> None:
    report = report_of(application(auth=auth, **KEYS), http_options={"host": "0.0.0.0"})
    assert report.is_sound, report.lines
    assert any("warning: http_options.host: 0.0.0.0 is reachable from outside" in line for line in report.lines)


def test_haproxy_without_a_host_is_everywhere(report_of: Callable[..., Report]) -> None:
    assert report_of(application(auth="none")).is_sound
    behind = report_of(application(auth="none"), environment=BEHIND_HAPROXY)
    assert behind.is_sound, "a service without keys answers nobody then, and `up` binds loopback"
    (line,) = [line for line in behind.lines if "HAProxy binds every interface where no host is written" in line]
    assert "warning: " in line
    local = report_of(application(auth="none"), http_options={"host": "127.0.0.1"}, environment=BEHIND_HAPROXY)
    assert not any("http_options" in line for line in local.lines)
    assert report_of(application(**KEYS), environment=BEHIND_HAPROXY).is_sound


def test_haproxy_accepts_clients_where_there_is_one_unless_the_environment_or_tls_says_otherwise() -> None:
    has_one = haproxy_program({}) is not None
    assert is_behind_haproxy({}, {}) == is_behind_haproxy({"http_options": {"host": "::1"}}, {}) == has_one
    assert not is_behind_haproxy({}, PLAIN)
    assert is_behind_haproxy({}, BEHIND_HAPROXY)
    assert not is_behind_haproxy({"http_options": TLS}, {})


def test_tls_files_want_serves_own_proxy(report_of: Callable[..., Report]) -> None:
    refused = report_of(application(auth="none"), http_options=TLS, environment=BEHIND_HAPROXY)
    assert not refused.is_sound
    assert "http_options.ssl_certfile: HAProxy does not encrypt" in "\n".join(refused.lines)
    for environment in ({}, PLAIN):
        report = report_of(application(auth="none"), http_options=TLS, environment=environment)
        assert report.is_sound
        assert "start Ray with RAY_SERVE_ENABLE_HA_PROXY=0" in "\n".join(report.lines)


def test_up_starts_nothing_that_check_refuses(
    report_of: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    report_of(application(auth="none"), http_options={"host": "0.0.0.0"})
    assert main(["up"]) == 1
    report_of(application(auth="none"))
    assert main(["check"]) == 0


@pytest.mark.parametrize("mode", ["disabled", "", "tokens"])
def test_ray_without_its_token_is_refused_by_name_where_others_reach_the_host(
    report_of: Callable[..., Report], mode: str
) -> None:
    environment = {"RAY_AUTH_MODE": mode, **PLAIN}
    outside = report_of(application(**KEYS), http_options={"host": "10.0.0.7"}, environment=environment)
    (line,) = [line for line in outside.lines if ": error: " in line]
    assert not outside.is_sound
    for part in ("http_options.host: 10.0.0.7", 'RAY_AUTH_MODE must be "token" or not be set', f"found {mode!r}"):
        assert part in line
    assert not report_of(application(**KEYS), environment=environment | BEHIND_HAPROXY).is_sound
    assert report_of(application(**KEYS), http_options={"host": "127.0.0.1"}, environment=environment).is_sound


@pytest.mark.parametrize("environment", [{}, {"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "Token"}])
def test_ray_with_its_token_is_sound_anywhere(report_of: Callable[..., Report], environment: dict[str, str]) -> None:
    assert report_of(application(**KEYS), http_options={"host": "10.0.0.7"}, environment=environment).is_sound


def test_the_environment_of_who_checks_or_starts_is_what_ray_would_have(
    report_of: Callable[..., Report], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report_of(application(**KEYS), http_options={"host": "0.0.0.0"})
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert main(["check"]) == main(["up"]) == 1
    assert capsys.readouterr().out.count("RAY_AUTH_MODE must be") == 2
    monkeypatch.delenv("RAY_AUTH_MODE")
    assert main(["check"]) == 0


def test_grpc_has_no_door_at_all(report_of: Callable[..., Report]) -> None:
    options = {"port": 9000, "grpc_servicer_functions": ["a.b.c"]}
    for each in (application(auth="none"), application(**KEYS)):
        report = report_of(each, grpc_options=options)
        assert not report.is_sound
        assert any("grpc_options.grpc_servicer_functions: Serve's gRPC entrance" in line for line in report.lines)


def test_keys_without_a_store_and_a_store_without_keys_are_told(report_of: Callable[..., Report]) -> None:
    without = report_of(application(auth="keys"))
    assert not without.is_sound
    assert "`auth: keys` needs a store of tenants" in "\n".join(without.lines)
    idle = report_of(application(auth="none", **KEYS))
    assert idle.is_sound
    assert "asks nobody for one" in "\n".join(idle.lines)


def test_accounts_are_one_replica(report_of: Callable[..., Report]) -> None:
    deployments = [{"name": "Router"}, {"name": "Accounts", "num_replicas": 2}]
    report = report_of(application(**KEYS, deployments=deployments))
    assert "one replica writes for the whole service" in "\n".join(report.lines)


def test_checking_makes_no_store(report_of: Callable[..., Report], tmp_path: Path) -> None:
    report_of(application(**KEYS))
    assert [file.name for file in tmp_path.iterdir()] == ["cluster.yaml"]
