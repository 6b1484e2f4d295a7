"""A cluster is started with what keeps it alive, and whoever starts one says otherwise at his own risk."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from serve_app.check.ray_environment import HAPROXY, is_behind_haproxy
from serve_app.cli import main
from serve_app.cli.environment import (
    HAPROXY_SETTINGS,
    INNER_PORTS,
    LOCAL_SETTINGS,
    claim,
    environment,
    loopback_haproxy,
    overridden,
    release,
)
from tests.cli.runs import needs_proc
from tests.ports import held_port

CLAIMING = 'from serve_app.cli.environment import claim; print(claim("127.0.0.1", {port}), flush=True); input()'


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RAY_memory_monitor_refresh_ms", "0"),  # somebody else's memory use would end every replica
        ("RAY_worker_oom_score_adjustment", "0"),  # and so would the kernel's killer, however small they are
        ("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1"),  # a proxy that dies would be away for half a minute
        ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"),  # exporters of metrics would listen on every interface
        ("RAY_worker_niceness", "0"),
        ("RAY_AUTH_MODE", "token"),
    ],
)
def test_a_local_cluster_is_started_with(name: str, value: str) -> None:
    assert environment({}, has_haproxy=False)[name] == environment({}, has_haproxy=True)[name] == value


def test_what_the_caller_has_set_stays_and_is_said() -> None:
    caller = {"RAY_memory_monitor_refresh_ms": "250", "RAY_worker_niceness": "0", "HOME": "/"}
    assert environment(caller, has_haproxy=False).items() >= caller.items()
    (line,) = overridden(caller, has_haproxy=False)
    assert line.startswith("RAY_memory_monitor_refresh_ms=250 from your environment, not 0: at 95 % of a node's memory")


def test_haproxy_has_its_own_settings_and_ports_that_no_other_service_has() -> None:
    added = environment({}, has_haproxy=True).keys() - environment({}, has_haproxy=False).keys()
    assert added | {HAPROXY} == {each.name for each in HAPROXY_SETTINGS + loopback_haproxy({})} | INNER_PORTS.keys()
    with ExitStack() as held:
        with suppress(OSError):  # then another service has it
            held.enter_context(socket.create_server(("127.0.0.1", INNER_PORTS["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"])))
        found = environment({}, has_haproxy=True)["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"]
    assert int(found) != INNER_PORTS["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"]
    assert environment({"RAY_SERVE_HAPROXY_STATS_PORT": "1"}, has_haproxy=True)["RAY_SERVE_HAPROXY_STATS_PORT"] == "1"


@pytest.mark.parametrize("choice", [{}, {HAPROXY: "0"}, {HAPROXY: "1"}])
def test_a_shell_reads_what_env_prints(
    choice: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {HAPROXY, *(each.name for each in loopback_haproxy({}))} - choice.keys():
        monkeypatch.delenv(name, raising=False)
    for name, value in choice.items():
        monkeypatch.setenv(name, value)
    assert main(["env"]) == 0
    script = capsys.readouterr().out + "env"
    printed = subprocess.run(["sh", "-c", script], env={}, capture_output=True, text=True, check=True).stdout
    seen = dict(line.split("=", 1) for line in printed.splitlines())
    wanted = environment({}, has_haproxy=is_behind_haproxy({}, choice))
    own = {each.name for each in LOCAL_SETTINGS} | INNER_PORTS.keys()
    assert {name: seen[name] for name in seen if name in wanted} == {
        name: value for name, value in wanted.items() if name not in own
    }, "one that other machines join must not bind its ports to loopback"


def test_a_service_on_a_usual_inner_port_has_it_for_itself() -> None:
    for name, usual in INNER_PORTS.items():
        assert environment({}, has_haproxy=True, port=usual)[name] != str(usual)


@needs_proc
def test_a_port_that_another_service_has_claimed_is_taken_before_anybody_listens_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    with held_port() as port:
        file.write_text(
            f"http_options: {{host: 127.0.0.1, port: {port}}}\n"
            "applications:\n- name: router\n  import_path: serve_app.deployments.apps:router\n  args: {}\n"
        )
        words = [sys.executable, "-c", CLAIMING.format(port=port)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"True\n"
            assert main(["up", str(file)]) == 1
            other.communicate(b"\n")
        told = capsys.readouterr().err
        assert f"http://127.0.0.1:{port} is taken: " in told
        assert "another service just starts there" in told
        assert all(claim("127.0.0.1", port) for _ in range(2)), "it went with its process, and ours may begin again"
        release("127.0.0.1", port)
