"""HAProxy says and binds what a service of ours needs, whatever Serve's template says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from serve_app.api.dialects import error_body
from serve_app.check.ray_environment import HAPROXY_BINARY
from serve_app.cli.environment import IN_PLACE, OURS_VARIABLE, environment, loopback_haproxy, overridden
from serve_app.core.errors import Unavailable
from tests.ports import held_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Ray has HAProxy for Linux alone")

NUMBERED = re.compile(r"\{\{ config\.(\w*)port \}\}")
SHOWING = """\
#!/bin/sh
while [ "$1" != -f ]; do shift; done
cat "$2"
echo "$@"
"""


def written(folder: Path, config: str, *more: str) -> tuple[list[str], str]:
    """Lines of the configuration that HAProxy reads, and the words that it is started with."""
    program, file = folder / "shows", folder / "a file.cfg"
    program.write_text(SHOWING)
    program.chmod(0o755)
    file.write_text(f"{config}\n")
    done = subprocess.run(
        [str(IN_PLACE), "-db", "-f", str(file), *more],
        env={OURS_VARIABLE: str(program), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert file.read_text() == f"{config}\n", "Serve's own file stays as it is"
    *lines, words = done.stdout.splitlines()
    return lines, words


@pytest.mark.parametrize("host", ["10.0.0.7", "*"])  # the second is what Serve makes of 0.0.0.0
def test_what_shows_statistics_is_bound_to_loopback_and_the_service_as_the_file_says(tmp_path: Path, host: str) -> None:
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE as TEMPLATE

    lines = [line for line in TEMPLATE.splitlines() if re.match(r" *bind |(frontend|listen) ", line)]
    lines = [re.sub(r"\{\{ config\.\w+host \}\}", host, NUMBERED.sub("8404", line)) for line in lines]
    assert sorted(bound(lines)) == sorted(["*:8404", f"{host}:8404", f"{host}:8404", ":8404"]), "another template"
    after = bound(written(tmp_path, "\n".join(lines))[0])
    assert sorted(after) == sorted([f"{host}:8404", f"{host}:8404", "127.0.0.1:8404", "127.0.0.1:8404"])


def bound(lines: list[str]) -> list[str]:
    return [line.split()[1] for line in lines if line.strip().startswith("bind ")]


def test_the_file_decides_where_the_service_itself_listens(tmp_path: Path) -> None:
    kept = [
        "frontend a",
        "    bind 0.0.0.0:80",
        "    bind :::80",
        "    bind [::]:80 proto h2",
        "    http-request x *:80",
    ]
    assert written(tmp_path, "\n".join(kept))[0] == kept


def test_a_client_has_twenty_seconds_for_its_headers(tmp_path: Path) -> None:
    lines = written(tmp_path, "global\ndefaults\n    mode http")[0]
    assert lines == ["global", "defaults", "    timeout http-request 20s", "    mode http"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (None, 503),  # it has just started, and knows no application
        ("/", 503),  # of which no router lives
        ("/elsewhere", 404),
    ],
)
def test_a_client_is_told_to_come_again_where_no_router_can_be_reached(path: str | None, status: int) -> None:
    with TemporaryDirectory(prefix="ha-") as folder:  # short: the paths of unix sockets are below it
        told = answer_of(Path(folder), path)
    assert told.status_code == status
    if status == 503:
        refusal = Unavailable("No router can be reached; retry.", None, {"retry_after_s": 1})
        assert (told.headers["retry-after"], told.json()) == ("1", error_body(refusal))


def answer_of(folder: Path, path: str | None) -> httpx.Response:
    """What HAProxy says by Serve's template, with one router behind that path, or with none; the router is dead."""
    from ray.serve._private import haproxy
    from ray.serve.config import HTTPOptions

    router = haproxy.ServerConfig("router", "127.0.0.1", 1)
    known = {} if path is None else {"a": haproxy.BackendConfig("a", path, timeout_connect_s=1, servers=[router])}
    names = ("socket_path", "server_state_base", "server_state_file", "metrics_socket_path")
    files: dict[str, Any] = {name: str(folder / name) for name in names}
    with held_port() as port, held_port() as statistics, held_port() as metrics:
        files |= {"stats_port": statistics, "metrics_port": metrics}
        config = haproxy.HAProxyConfig(http_options=HTTPOptions(host="127.0.0.1", port=port), **files)
        haproxy.HAProxyApi(config, known, str(folder / "a.cfg"))._generate_config_file_internal()
        running = subprocess.Popen([IN_PLACE, "-db", "-f", folder / "a.cfg"], env=environment({}, has_haproxy=True))
        try:
            with httpx.Client(transport=httpx.HTTPTransport(retries=9)) as client:
                return client.get(f"http://127.0.0.1:{port}/v1/models", timeout=60)
        finally:
            running.kill()
            running.wait()


def test_every_other_word_is_passed_on(tmp_path: Path) -> None:
    words = written(tmp_path, "x", "-sf", "1", "2", "-x", "a b")[1]
    assert words == f"-f {tmp_path}/a file.cfg.loopback -sf 1 2 -x a b"


def test_a_program_of_the_callers_stays(tmp_path: Path) -> None:
    own = {HAPROXY_BINARY: "/opt/haproxy"}
    assert loopback_haproxy(own) == ()
    assert environment(own, has_haproxy=True)[HAPROXY_BINARY] == "/opt/haproxy"
    (line,) = overridden(own, has_haproxy=True)
    assert line.startswith(f"{HAPROXY_BINARY}=/opt/haproxy from your environment: its statistics are open")
    assert (
        list(overridden(own, has_haproxy=False))
        == list(overridden(environment({}, has_haproxy=True), has_haproxy=True))
        == []
    )
    assert OURS_VARIABLE not in environment({}, has_haproxy=False)


def test_ours_is_one_that_serve_starts() -> None:
    found = environment({}, has_haproxy=True)
    assert found[HAPROXY_BINARY] == str(IN_PLACE)
    version = subprocess.run([IN_PLACE, "-v"], env=found, capture_output=True, check=True, text=True).stdout
    assert version.startswith("HAProxy version ")
