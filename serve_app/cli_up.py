"""Starts a local cluster that serves a file, says when it is ready, and ends it on Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.25

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",  # Ray's own ports; the token is made on first use and kept in the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's default is 15, which leaves the service whatever other processes do not want
    "OMP_WAIT_POLICY": "PASSIVE",
}
FAST_ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # the default of 30 s is for load balancers far away
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "900",  # the default cuts streams two minutes after a change of replicas
}


def serve_until_interrupted(file: str, *, is_fast: bool) -> int:
    """Run `serve run` on the file, with its output; the exit code is its own."""
    address = address_of(file)
    if _is_taken(address):
        print(f"serve_app: something listens on {address} already", file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)  # also SIGINT: a shell starts background jobs with it ignored
    cluster = _start(file, is_fast=is_fast)
    try:
        if _wait_until_ready(cluster, address):
            print(_welcome(address, Path(file)), flush=True)
        return cluster.wait()
    except KeyboardInterrupt:
        return _stop(cluster)


def environment(base: Mapping[str, str], *, is_fast: bool) -> dict[str, str]:
    """What Ray's processes are started with; what the caller has set already stays."""
    defaults = ENVIRONMENT | (FAST_ENVIRONMENT if is_fast else {})
    return {**defaults, **base}


def address_of(file: str) -> str:
    """The URL that the file's service is reached under from this machine."""
    options = (_content(Path(file)).get("http_options") or {}) if Path(file).exists() else {}
    host = options.get("host", "127.0.0.1")
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{options.get('port', 8000)}"


def _is_taken(address: str) -> bool:
    url = urllib.parse.urlsplit(address)
    try:
        with socket.create_connection((str(url.hostname), url.port or 80), timeout=1):
            return True
    except OSError:
        return False


def _start(file: str, *, is_fast: bool) -> subprocess.Popen[bytes]:
    """In a session of its own: a Ctrl-C in the terminal reaches us alone, and we pass it on once."""
    serve = Path(sys.executable).with_name("serve")
    return subprocess.Popen(
        [str(serve), "run", file], env=environment(os.environ, is_fast=is_fast), start_new_session=True
    )


def _wait_until_ready(cluster: subprocess.Popen[bytes], address: str) -> bool:
    """False where the cluster ended, or did not become ready in time."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while cluster.poll() is None and time.monotonic() < deadline:
        if _is_healthy(address):
            return True
        time.sleep(POLL_S)
    return False


def _is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _welcome(address: str, file: Path) -> str:
    name = next(
        (each["args"]["name"] for each in _content(file)["applications"] if "name" in (each.get("args") or {})), "demo"
    )
    body = f'{{"model": "{name}", "prompt": "Once upon a time", "max_tokens": 48}}'
    return (
        f"\nReady on {address}. Try:\n\n"
        f"  curl {address}/v1/completions -H 'content-type: application/json' \\\n    -d '{body}'\n\n"
        f"  curl {address}/v1/models\n\nCtrl-C ends everything.\n"
    )


def _content(file: Path) -> dict[str, Any]:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _stop(cluster: subprocess.Popen[bytes]) -> int:
    """Let Serve shut down by itself; a second Ctrl-C, or too long a wait, ends it at once."""
    print("\nStopping…", flush=True)
    cluster.send_signal(signal.SIGINT)
    try:
        cluster.wait(STOP_TIMEOUT_S)
        return 0
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(cluster.pid, signal.SIGKILL)  # its session: the cluster it started, nothing else
        cluster.wait()
        return 1
