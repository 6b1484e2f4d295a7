"""Gathers the doctor's facts on the machine that a service runs on. Changes nothing, and reads no prompt or answer."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from serve_app.check.cluster_file import check_file
from serve_app.cli.address import address_of, args_of, read_cluster_file
from serve_app.cli.client import check_url
from serve_app.cli.doctor.facts import Facts, Hole, Listener, SecretFile
from serve_app.cli.doctor.probes import RAY_PATHS, anonymous_statuses, answers_of, ask, doubt_of, tried
from serve_app.cli.processes import (
    Process,
    ancestors_of,
    children_of,
    core_limit_of,
    environment_of,
    listener_on,
    listeners_of,
    processes_of_runs,
    with_words,
)
from serve_app.cli.screen import KEY_VARIABLES
from serve_app.tenants.keys import DEFAULT_PEPPER, VARIABLE
from serve_app.tenants.opening import Inspection, inspect_store

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
SESSION = "session_"
"""What the names of Ray's sessions begin with; the core processes of one have it in their commands."""
SOURCES = re.compile(r"\.adapter_roots\[|\.args\.adapters: ")
"""What `serve_app check` calls the places of adapters."""
MAX_PICKLES = 8
AUDIT_TIMEOUT_S = 60


def gather(file: str, *, url: str | None = None) -> Facts:
    """url: where clients reach the service; None is as the cluster file says. Raises CommandFailed where it is none"""
    if url is not None:
        check_url(url)
    content, address = read_cluster_file(Path(file)), address_of(file)
    processes = processes_of_cluster(address.port)
    raylet = next((each for each in processes if each.program == "raylet"), None)
    environment = {} if raylet is None else environment_of(raylet.pid)
    listeners = tuple(
        Listener(address=at, port=port, holder=each) for each in processes for at, port in listeners_of(each)
    )
    asked = url or str(address)
    key = next(filter(None, map(os.environ.get, KEY_VARIABLES)), None)
    answers = answers_of(asked, key)
    place, was_fetched = tried(asked, key) if answers else (None, False)
    told = check_file(file, environment=environment).lines
    return Facts(
        file=file,
        content=content,
        complaints=tuple(line for line in told if ": error: " in line),
        sources=tuple(line for line in told if ": warning: " in line and SOURCES.search(line)),
        url=asked if answers else None,
        port=address.port,
        environment=environment,
        listeners=listeners,
        doubt=doubt_of(asked) if answers else None,
        answers=answers if place is None else {**answers, "place": place},
        was_fetched=was_fetched,
        anonymous=anonymous_statuses(asked) if answers else {},
        ray_answers=dict(_ray_answers(listeners)),
        store=_store(content, environment),
        token=_token(environment),
        num_dumping=sum(core_limit_of(each) != 0 for each in processes),
        open_logs=tuple(open_logs(processes)),
        pickles=tuple(_pickles(content))[:MAX_PICKLES],
        holes=_known_holes(),
    )


def processes_of_cluster(port: int) -> tuple[Process, ...]:
    """Return all that belong to whoever listens on the port: the run of `serve_app up`, or the session of Ray."""
    holder = listener_on(port)
    if holder is None:
        return ()
    if holder.run is not None:
        return tuple(processes_of_runs(holder.run))
    raylet = next((each for each in ancestors_of(holder) if each.program == "raylet"), None)
    if raylet is None:
        return (holder,)
    found = {each.pid: each for each in children_of(raylet.pid)}
    for name in {folder.name for folder in _sessions([raylet])}:
        found |= {each.pid: each for each in with_words(name)}
    return tuple(found[pid] for pid in sorted(found))


def _sessions(processes: Sequence[Process]) -> set[Path]:
    """Return the folders of Ray's sessions that the processes' commands name."""
    words = (word for each in processes for word in each.command.replace("=", " ").split() if SESSION in word)
    paths = (Path(word) for word in words)
    return {path for each in paths for path in (each, *each.parents) if path.name.startswith(SESSION)}


def open_logs(processes: Sequence[Process]) -> Iterator[str]:
    """Yield logs that others may read, of those that the cluster's processes write."""
    for session in sorted(_sessions([each for each in processes if each.program == "raylet"])):
        for file in sorted((session / "logs").rglob("*")):
            with suppress(OSError):
                if file.is_file() and file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
                    yield str(file)


def _ray_answers(listeners: Sequence[Listener]) -> Iterator[tuple[str, int]]:
    """Yield what is answered by whatever speaks HTTP among the sockets of Ray's dashboard."""
    for each in listeners:
        if each.is_dashboard:
            host = "127.0.0.1" if each.is_outside else each.address
            url = f"http://[{host}]:{each.port}" if ":" in host else f"http://{host}:{each.port}"
            for path in RAY_PATHS:
                answer = ask(url, "GET", path, {})
                if answer is not None and (answer.status != 200 or "json" in answer.headers.get("content-type", "")):
                    yield f"{url}{path}", answer.status  # exporters of metrics answer any path with metrics


def _store(content: Mapping[str, Any], environment: Mapping[str, str]) -> Inspection | None:
    for args in args_of(content):
        if args.get("store"):
            pepper = Path(str(args.get("pepper") or DEFAULT_PEPPER))
            secret = environment.get(VARIABLE, os.environ.get(VARIABLE))
            return inspect_store(str(args["store"]), pepper_file=pepper, environment=secret)
    return None


def _token(environment: Mapping[str, str]) -> SecretFile | None:
    """Look at the file of Ray's token (https://docs.ray.io, Token authentication)."""
    named = environment.get("RAY_AUTH_TOKEN_PATH") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        reached = all(stat.S_IMODE(folder.stat().st_mode) & stat.S_IXOTH for folder in file.resolve().parents)
    except OSError:
        return None
    return SecretFile(path=str(file), mode=mode, is_open=bool(mode & 0o007) and reached)


def _pickles(content: Mapping[str, Any]) -> Iterator[str]:
    for args in args_of(content):
        adapters = args.get("adapters")
        for named in (args.get("path"), adapters.get("path") if isinstance(adapters, dict) else adapters):
            folder = Path(str(named or ""))
            if named and folder.is_dir():
                yield from (str(each) for each in sorted(folder.rglob("*")) if each.suffix in PICKLES)


def _known_holes() -> tuple[Hole, ...] | None:
    """Ask pip-audit, which asks PyPI's database; None where it is not installed or reaches nobody."""
    command = [sys.executable, "-m", "pip_audit", "--local", "--progress-spinner=off", "--format=json"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=AUDIT_TIMEOUT_S, check=False)
        return holes_of(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError):
        return None


def holes_of(report: bytes) -> tuple[Hole, ...]:
    """Read pip-audit's JSON. Raises ValueError or KeyError where it is none."""
    return tuple(
        Hole(
            identifier=hole["id"],
            package=package["name"],
            version=package["version"],
            fixed=next(iter(hole["fix_versions"]), None),
        )
        for package in json.loads(report)["dependencies"]
        for hole in package.get("vulns", ())
    )
