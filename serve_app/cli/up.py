"""Serves a file in a new cluster or one that runs, tells how it comes along, watches it, ends it; ends former ones."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

from serve_app.api.paths import Path as Route
from serve_app.check.document import Finding, Severity
from serve_app.check.ray_environment import is_behind_haproxy
from serve_app.cli.address import Address, address_of, args_of, read_cluster_file, store_of
from serve_app.cli.cluster import LOCAL
from serve_app.cli.environment import RUN_VARIABLE, claim, cluster_settings, environment, overridden, release
from serve_app.cli.log_file import MAX_READ, last_lines, log_path, opened, told_by
from serve_app.cli.log_file import telling as telling_lines
from serve_app.cli.processes import (
    Process,
    end_runs,
    is_running,
    listener_on,
    processes_of_runs,
    send,
    send_to_parent,
    start_guard,
)
from serve_app.cli.screen import KEY_VARIABLE, CommandFailed, Exit, answer
from serve_app.cli.startup import Events, JsonTelling, LineTelling, Startup, replicas_wanted
from serve_app.core.machine import command, variables

STOP_TIMEOUT_S = 60.0
GRACE_S = STOP_TIMEOUT_S + 10.0  # what `up` allows, and a little more
LOST_AFTER_S = 30.0  # a proxy that dies is back in a few seconds
STARTING_POLL_S = 0.25
WATCH_S = 1.0
LAST_LINES_S = 1.0
SERVING_MODULE = "serve_app.cli.cluster"

TELLING_LOGS = re.compile(r"^(?:gcs_server|raylet|serve/|worker|python-core-driver)")
"""Of what a service needs; Ray's monitor and dashboards fail without harm to it."""
RAYS_ERROR = re.compile(r"^\[[^\]]* [CEF] \d+ \d+\]|\bERROR \d{4}-")
"""As its processes in C++ and those of Serve write them."""
CORE_PROGRAMS = frozenset({"gcs_server", "raylet"})
"""Ray replaces every other process by itself; without these nothing works, and it may not notice for minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A started one: the process that serves the file, the run that all its processes belong to, how far it came.

    log: where what they say goes; None is our own output
    writing: what brings it there
    has_core: whether Ray's own processes are of the run
    """

    process: subprocess.Popen[bytes]
    run: str
    address: Address
    events: Events
    log: Path | None
    writing: threading.Thread | None = None
    has_core: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What makes a cluster useless, in words.  messages: of Serve's, with the reason in them"""

    what: str
    messages: tuple[str, ...] = ()


def serve_until_interrupted(
    file: str,
    *,
    port: int | None = None,
    has_dashboard: bool = False,
    at: str = LOCAL,
    log: str | None = None,
    as_json: bool = False,
) -> int:
    """Serve the file in a cluster; the exit code is 0 where it was ended by a person. Raises CommandFailed.

    port: in the place of the file's own
    has_dashboard: whether Ray's own runs beside it
    at: the address of the Ray cluster, which has a proxy on this machine; `local` starts one
    log: where its processes' lines go; None is this port's own file, and "-" is here
    """
    address = address_of(file, port)
    if address.is_taken() or not claim(address.host, address.port):
        raise CommandFailed(taken(address, file))
    path = log_path(address, log)
    told = JsonTelling() if as_json else LineTelling()
    has_haproxy = is_behind_haproxy(read_cluster_file(Path(file)), os.environ)
    if at == LOCAL:
        _tell_environment(has_haproxy=has_haproxy, is_quiet=as_json)
    _be_interrupted_by_signals()
    run = f"{address.port}-{uuid.uuid4().hex[:12]} {origin_of(file)}"
    guard = start_guard(run)
    try:
        cluster = _start(file, run, address, path, at, has_haproxy=has_haproxy, has_dashboard=has_dashboard)
        return _serve(cluster, Path(file), told)
    finally:
        release(address.host, address.port)
        end_runs(run)
        guard.communicate()  # closes its stdin


def origin_of(file: str) -> str:
    """Return what the names of the file's runs end with: the file, and the checkout whose `serve_app up` serves it."""
    return f"{Path(file).resolve()} of {Path(__file__).resolve().parents[2]}"


def runs_of(file: str, port: int | None = None) -> list[Process]:
    """Return every process of the runs of this file by this checkout, on that port or, where None, on any."""
    start, end = "" if port is None else f"{port}-", f" {origin_of(file)}"
    return [each for each in processes_of_runs(start) if each.run is not None and each.run.endswith(end)]


def taken(address: Address, file: str) -> str:
    """Return who listens there already, which file's run that is, and how to end it or serve beside it."""
    holder = listener_on(address.port)
    beside = f"or serve on another port: `serve_app up {file} --port N`, or http_options.port in the file"
    if holder is None:
        whose = "a process of another user listens there, another service just starts there, or it is no address of"
        return f"{address} is taken: {whose} this machine; end it, {beside}"
    if holder.run is None:
        return f"{holder} listens on {address} already; end it, {beside}"
    origin = holder.run.partition(" ")[2]
    if origin == origin_of(file):
        return f"{holder}, a run of {file}, listens on {address} already; `serve_app down {file}` ends it, {beside}"
    return f"{holder}, a run of {origin}, listens on {address} already; `serve_app down` ends it there, {beside}"


def notes_on_port(file: str) -> Iterator[Finding]:
    """Yield a note where something listens already on the file's port, for `serve_app check`."""
    address = address_of(file)
    if address.is_taken():
        yield Finding(path=("http_options", "port"), message=taken(address, file), severity=Severity.NOTE)


def _tell_environment(*, has_haproxy: bool, is_quiet: bool) -> None:
    """Say what Ray is started with, and what of it the caller wants otherwise."""
    names = ", ".join(
        each.name for each in cluster_settings(os.environ, has_haproxy=has_haproxy) if each.name not in os.environ
    )
    if not is_quiet:
        print(f"Starting Ray with {names}; `serve_app env` says why", flush=True)
    for line in overridden(os.environ, has_haproxy=has_haproxy):
        print(f"serve_app: {line}", file=sys.stderr)


def _start(
    file: str, run: str, address: Address, log: Path | None, at: str, *, has_haproxy: bool, has_dashboard: bool
) -> Cluster:
    """Start the cluster in a session of its own: a Ctrl-C reaches us alone, and we pass it on once."""
    ours, theirs = os.pipe()
    words = (str(int(has_dashboard)), at, file, str(address.port), str(theirs), str(os.getpid()))
    settings = environment(os.environ, has_haproxy=has_haproxy, port=address.port, is_local=at == LOCAL)
    output = writing = None
    if log is not None:
        lines, output = os.pipe()
        writing = threading.Thread(target=opened(log).take, args=(lines,), name="log", daemon=True)
        writing.start()
    try:
        process = subprocess.Popen(
            command(SERVING_MODULE, *words),
            env=variables(settings | {RUN_VARIABLE: run}),
            start_new_session=True,
            pass_fds=[theirs],
            stdout=output,
            stderr=output,
        )
    finally:
        for descriptor in (theirs, *([] if output is None else [output])):
            os.close(descriptor)
    return Cluster(
        process=process,
        run=run,
        address=address,
        events=Events(ours),
        log=log,
        writing=writing,
        has_core=at == LOCAL,
    )


def _serve(cluster: Cluster, file: Path, told: LineTelling) -> int:
    try:
        loss = _watch(cluster, file, told)
    except KeyboardInterrupt:
        print("\nStopping…", file=sys.stderr, flush=True)
        return Exit.DONE if _shut_down(cluster) else Exit.FAILED
    if loss is None and not cluster.process.wait():
        return Exit.DONE
    loss = loss or Loss(what="the cluster ended by itself")
    print(f"serve_app: {loss.what}; ending what is left of the cluster{_because(cluster, loss)}", file=sys.stderr)
    if cluster.has_core:
        _kill(cluster)
    else:
        _shut_down(cluster)
    return Exit.FAILED


def _watch(cluster: Cluster, file: Path, told: LineTelling) -> Loss | None:
    """Tell until it is ready, then wait for what makes it useless; None where it ended by itself."""
    startup, began = Startup(replicas_wanted(read_cluster_file(file))), time.monotonic()
    told.begin(list(startup.applications.values()), None if cluster.log is None else str(cluster.log))
    core: dict[str, Process] = {}
    heard: float | None = None  # since it was ready
    while cluster.process.poll() is None:
        if lost := [program for program, process in core.items() if not is_running(process)]:
            return Loss(what=f"Ray's {' and '.join(lost)} died")
        if cluster.has_core and core.keys() != CORE_PROGRAMS:
            core = {each.program: each for each in processes_of_runs(cluster.run) if each.program in CORE_PROGRAMS}
        for event in cluster.events.new():
            told.update(startup.update(event), time.monotonic() - began)
        if heard is None and (failed := startup.failed):
            messages = tuple(message for each in failed for message in each.messages)
            return Loss(what=f"{' and '.join(each.name for each in failed)} cannot be served", messages=messages)
        if heard is None and is_healthy(cluster.address):
            told.ready(str(cluster.address), time.monotonic() - began, welcome(cluster.address, file))
            heard = time.monotonic()
        if heard is not None and cluster.address.is_taken():
            heard = time.monotonic()
        if heard is not None and time.monotonic() - heard > LOST_AFTER_S:
            return Loss(what=f"nothing has listened on {cluster.address} for {LOST_AFTER_S:.0f} s")
        time.sleep(STARTING_POLL_S if heard is None else WATCH_S)
    return None


def _because(cluster: Cluster, loss: Loss) -> str:
    """Return the lines that tell why, and where the others are."""
    if cluster.writing is not None:
        cluster.writing.join(LAST_LINES_S)  # what was still on its way; others may hold the other end
    lines, session = told_by(cluster.log, loss.messages), session_of(cluster.process.pid)
    if session is not None and not telling_lines("\n".join(lines)):
        lines = lines_of_session(session) or lines
    lines += [] if cluster.log is None else [f"all of it: {cluster.log}"]
    lines += [] if session is None else [f"Ray's own logs: {session}"]
    return "".join(f"\n  {line}" for line in lines)


def session_of(pid: int) -> Path | None:
    """Return the folder of logs of the session of Ray that the process began; None where it came to none."""
    folder = Path(os.environ.get("RAY_TMPDIR") or gettempdir(), "ray")
    return next(folder.glob(f"session_*_{pid}/logs"), None)


def lines_of_session(folder: Path) -> list[str]:
    """Return the lines of Ray's own logs that name an error, of the file that was written last among those with any."""
    files = {str(file.relative_to(folder)): file for file in folder.rglob("*.*") if file.is_file()}
    for name, file in sorted(files.items(), key=lambda each: each[1].stat().st_mtime, reverse=True):
        if TELLING_LOGS.match(name) and (lines := errors_of(file)):
            return [f"{name}: {line}" for line in lines]
    return []


def errors_of(file: Path) -> list[str]:
    """Return the lines that name an error in a log of Ray's, whose own processes mark them by a letter."""
    text = file.read_text(encoding="utf-8", errors="replace")[-MAX_READ:]
    return telling_lines(text) or last_lines("\n".join(filter(RAYS_ERROR.search, text.splitlines())))


def is_healthy(address: Address) -> bool:
    """Return whether every model of the service has a replica; asked past any proxy."""
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{address}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def welcome(address: Address, file: Path) -> str:
    """Return what to try first, by hand and in a browser."""
    content = read_cluster_file(file)
    name = next((each["name"] for each in args_of(content) if "name" in each), "demo")
    body = f'{{"model": "{name}", "prompt": "Once upon a time", "max_tokens": 48}}'
    key = f' -H "authorization: Bearer ${KEY_VARIABLE}"' if store_of(content) else ""
    return (
        f"\nReady on {address}. In a browser:\n\n  {address}{Route.CONSOLE}\n\nOr try:\n\n"
        f"  curl {address}/v1/completions{key} -H 'content-type: application/json' \\\n    -d '{body}'\n\n"
        f"  curl {address}/v1/models{key}\n\nCtrl-C ends everything.\n"
    )


def _be_interrupted_by_signals() -> None:
    """Also by SIGINT: a shell starts background jobs with it ignored. Whoever has SIGHUP ignored wants us to stay."""
    stays = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    for number in (signal.SIGINT, signal.SIGTERM, *(() if stays else (signal.SIGHUP,))):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _shut_down(cluster: Cluster) -> bool:
    """Let Serve shut down by itself; a second Ctrl-C, or too long a wait, ends it at once, and then False.

    In a cluster of somebody else's what is served would stay if our child were killed.
    """
    cluster.process.send_signal(signal.SIGINT)
    try:
        cluster.process.wait(STOP_TIMEOUT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        _kill(cluster)
        return False
    return True


def _kill(cluster: Cluster) -> None:
    """Kill our child, and with it Ray's own processes, which die with theirs; `end_runs` sees to the rest."""
    cluster.process.kill()
    cluster.process.wait()


def end_cluster(file: str, *, port: int | None = None, as_json: bool = False) -> int:
    """End every process of the file's runs, on that port or on any; 0 where none is left. Raises CommandFailed.

    A file that cannot be read names no run: nothing is ended.
    """
    found = runs_of(file, port)
    if not isinstance(read_cluster_file(Path(file)).get("applications"), list):
        raise CommandFailed(_unread(file, found))
    address = address_of(file, port)
    if not found and address.is_taken():
        raise CommandFailed(f"{file} has no run{'' if port is None else f' on port {port}'}: {taken(address, file)}")
    ours = f"of `serve_app up {file}`"
    words = f"Ending {len(found)} processes {ours}" if found else f"Nothing {ours} is left"
    answer({"file": file, "url": str(address), "num_processes": len(found)}, words, as_json=as_json)
    serving = [each for each in found if SERVING_MODULE in each.command]
    for each in serving:
        _interrupt_serving(each)
    # who serves the file shuts Serve down; where nobody does, nothing would end by itself
    deadline = time.monotonic() + (GRACE_S if serving else 0.0)
    for run in sorted({each.run for each in found if each.run is not None}):
        end_runs(run, grace_s=deadline - time.monotonic())
    return Exit.DONE


def _unread(file: str, found: Sequence[Process]) -> str:
    """Return why nothing was ended, and how to end what once was started with a file of that name."""
    told = f"{file} is no cluster file that can be read, so nothing was ended (`serve_app check {file}` says why)"
    pids = sorted({each.command.rpartition(" ")[2] for each in found if SERVING_MODULE in each.command})
    if pids:
        return f"{told}; its earlier run ends with `kill -INT {' '.join(pids)}`"
    return f"{told}; name the file that `serve_app up` was started with"


def _interrupt_serving(serving: Process) -> None:
    """Interrupt `serve_app up`, whose id is the last argument, or the process itself where that has died."""
    parent = int(serving.command.rpartition(" ")[2])
    if not send_to_parent(serving, parent, signal.SIGINT):
        send(serving, signal.SIGINT)
