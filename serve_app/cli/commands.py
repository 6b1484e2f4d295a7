"""The commands that start, end and check a service; each imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from serve_app.cli.offering import CLUSTER_FILE, SWITCH, AsJson, ClusterFile, Fast
from serve_app.cli.screen import Exit, answer, say, say_json

if TYPE_CHECKING:
    from serve_app.check.cluster_file import Report

ENVIRONMENT = "A cluster that you start yourself wants the environment that `serve_app env` prints; `up` sets it."
Log = Annotated[
    str | None, typer.Option("--log", metavar="FILE", help="Where Ray's own lines go; - is here. Usually a file, told.")
]
Port = Annotated[
    int | None,
    typer.Option("--port", min=1, max=65_535, help="In the place of the file's http_options.port."),
]
Dashboard = Annotated[
    bool,
    typer.Option("--dashboard", metavar=SWITCH, help="Ray's dashboard too, on port 8265, for `serve deploy`."),
]


def up(
    file: ClusterFile = CLUSTER_FILE,
    fast: Fast = False,
    port: Port = None,
    dashboard: Dashboard = False,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="HOST:PORT", help="Of a Ray cluster to serve it in; auto is this machine's."),
    ] = None,
    log: Log = None,
    as_json: AsJson = False,
) -> int:
    """Start a local cluster, or take one that runs, and serve a cluster file until Ctrl-C."""
    from serve_app.check.cluster_file import check_file  # imports Ray, which takes its time
    from serve_app.cli.up import serve_until_interrupted

    _say_of_fast(fast)
    report = check_file(file, environment=os.environ)
    if not as_json:
        say("\n".join(report.lines))
    elif not report.is_sound:
        _say_report(file, report)
    if not report.is_sound:
        return Exit.FAILED
    return serve_until_interrupted(
        file, port=port, has_dashboard=dashboard, at=address or "local", log=log, as_json=as_json
    )


def down(
    file: ClusterFile = CLUSTER_FILE,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65_535, help="Of its run on this port alone.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """End what `up` of that file has started from this checkout, and nothing else."""
    from serve_app.cli.up import end_cluster

    return end_cluster(file, port=port, as_json=as_json)


def check(file: ClusterFile = CLUSTER_FILE, fast: Fast = False, as_json: AsJson = False) -> int:
    """Validate a cluster file; starts nothing."""
    from serve_app.check.cluster_file import check_file
    from serve_app.cli.up import notes_on_port

    _say_of_fast(fast)
    report = check_file(file, environment=os.environ, notes=notes_on_port(file))
    if as_json:
        _say_report(file, report)
    else:
        say("\n".join([*report.lines, ENVIRONMENT]))
    return Exit.DONE if report.is_sound else Exit.FAILED


def doctor(
    file: ClusterFile = CLUSTER_FILE,
    url: Annotated[
        str | None, typer.Option("--url", help="Where clients reach it, as behind TLS. Usually as in the file.")
    ] = None,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", metavar=SWITCH, help="Look at every node of the Ray cluster instead: what differs."),
    ] = False,
    fast: Fast = False,
    as_json: AsJson = False,
) -> int:
    """Look at what a running service lets in, and say how to mend it."""
    from serve_app.cli.doctor import differences, report  # imports Ray, which takes its time

    _say_of_fast(fast)
    return differences.run(file, as_json=as_json) if cluster else report.run(file, url=url, as_json=as_json)


def env(fast: Fast = False, as_json: AsJson = False) -> int:
    """Print the environment that a cluster of your own wants, as shell lines."""
    from serve_app.check.ray_environment import is_behind_haproxy
    from serve_app.cli.environment import cluster_settings, shell_lines

    _say_of_fast(fast)
    has_haproxy = is_behind_haproxy({}, os.environ)
    settings = [asdict(each) for each in cluster_settings(os.environ, has_haproxy=has_haproxy)]
    return answer(settings, "\n".join(shell_lines(os.environ, has_haproxy=has_haproxy)), as_json=as_json)


def _say_of_fast(fast: bool) -> None:
    if fast:
        print("serve_app: --fast is the default now, and goes with the next version", file=sys.stderr)


def _say_report(file: str, report: Report) -> None:
    say_json({"file": file, "is_sound": report.is_sound, "lines": list(report.lines)})
