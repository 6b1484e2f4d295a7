"""A cluster is started with what keeps it alive, and whoever starts one says otherwise at his own risk."""

from __future__ import annotations

import subprocess

import pytest

from serve_app.cli import main
from serve_app.cli.environment import FAST_SETTINGS, LOCAL_SETTINGS, environment, overridden
from serve_app.cli.haproxy import loopback_haproxy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RAY_memory_monitor_refresh_ms", "0"),  # somebody else's memory use would end every replica
        ("RAY_worker_oom_score_adjustment", "0"),  # and so would the kernel's killer, however small they are
        ("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1"),  # a proxy that dies would be away for half a minute
        ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"),  # exporters of metrics would listen on every interface
        ("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "serve_app.http.proxy:protect"),
        ("RAY_worker_niceness", "0"),
        ("RAY_AUTH_MODE", "token"),
    ],
)
def test_a_local_cluster_is_started_with(name: str, value: str) -> None:
    assert environment({}, is_fast=False)[name] == value


def test_what_the_caller_has_set_stays_and_is_said() -> None:
    caller = {"RAY_memory_monitor_refresh_ms": "250", "RAY_worker_niceness": "0", "HOME": "/"}
    assert environment(caller, is_fast=False).items() >= caller.items()
    (line,) = overridden(caller, is_fast=False)
    assert line.startswith("RAY_memory_monitor_refresh_ms=250 from your environment, not 0: at 95 % of a node's memory")


def test_throughput_mode_adds_its_own_settings() -> None:
    added = environment({}, is_fast=True).keys() - environment({}, is_fast=False).keys()
    assert added == {each.name for each in FAST_SETTINGS} | loopback_haproxy({}).keys()


@pytest.mark.parametrize("arguments", [["env"], ["env", "--fast"]])
def test_a_shell_reads_what_env_prints(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    script = capsys.readouterr().out + "env"
    printed = subprocess.run(["sh", "-c", script], env={}, capture_output=True, text=True, check=True).stdout
    seen = dict(line.split("=", 1) for line in printed.splitlines())
    wanted = environment({}, is_fast="--fast" in arguments)
    own = {each.name for each in LOCAL_SETTINGS} | loopback_haproxy({}).keys()
    assert {name: seen[name] for name in seen if name in wanted} == {
        name: value for name, value in wanted.items() if name not in own
    }, "one that other machines join must not bind its ports to loopback"
