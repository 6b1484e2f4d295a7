"""Gathers the doctor's facts on the machine that a service runs on. Changes nothing, and reads no prompt or answer."""

from __future__ import annotations

import http.client
import os
import ssl
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from serve_app.api.paths import OPEN, AdminPath
from serve_app.api.paths import Path as Route
from serve_app.cli.address import address_of, args_of, read_cluster_file
from serve_app.cli.client import check_url
from serve_app.cli.doctor.facts import Facts, Listener, SecretFile
from serve_app.cli.processes import (
    Process,
    ancestors_of,
    children_of,
    environment_of,
    listener_on,
    listeners_of,
    processes_of_runs,
    with_words,
)
from serve_app.tenants.keys import DEFAULT_PEPPER, VARIABLE
from serve_app.tenants.opening import Inspection, inspect_store

SESSION = "session_"
"""What the names of Ray's sessions begin with; the core processes of one have it in their commands."""
TIMEOUT_S = 5.0
RAY_PATHS = ("/api/jobs/", "/api/serve/applications/")


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
    is_there = ask(asked, "GET", Route.HEALTH) is not None
    return Facts(
        file=file,
        url=asked if is_there else None,
        port=address.port,
        environment=environment,
        listeners=listeners,
        doubt=doubt_of(asked) if is_there else None,
        anonymous=anonymous_statuses(asked) if is_there else {},
        ray_answers=dict(_ray_answers(listeners)),
        store=_store(content, environment),
        token=_token(environment),
        open_logs=tuple(open_logs(processes)),
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
                answer = ask(url, "GET", path)
                if answer is not None and (answer.status != 200 or "json" in answer.kind):
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


class Answer(NamedTuple):
    """What came back of a request. kind: the content's"""

    status: int
    kind: str


def ask(url: str, method: str, path: str) -> Answer | None:
    """Return what comes back; None where that is no HTTP, or too late. Any certificate will do: no key is sent."""
    try:
        with closing(_connection(url, is_verified=False)) as connection:
            body = None if method == "GET" else b""
            connection.request(method, path, body=body)
            response = connection.getresponse()
            return Answer(response.status, response.getheader("content-type", ""))
    except (OSError, ValueError, http.client.HTTPException):
        return None


def doubt_of(url: str) -> str | None:
    """Return why this machine trusts no name of the certificate there; None where it does, or there is none."""
    if not url.startswith("https:"):
        return None
    try:
        with closing(_connection(url, is_verified=True)) as connection:
            connection.connect()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return None


def anonymous_statuses(url: str) -> dict[tuple[str, str], int]:
    """Return the status of every route that somebody without a key must not have."""
    asked = ((route, ask(url, *route)) for route in routes())
    return {route: answer.status for route, answer in asked if answer is not None}


def routes() -> Iterator[tuple[str, str]]:
    """Yield method and path, with a name that nothing has in the place of names."""
    for path in Route:
        if path not in OPEN:
            yield path.method, path.replace("{id}", "doctor")
    for admin in AdminPath:
        yield "GET", admin.replace("{name}", "doctor").replace("{id}", "doctor")


def _connection(url: str, *, is_verified: bool) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme == "https":
        context = ssl.create_default_context()
        if not is_verified:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(parts.netloc, timeout=TIMEOUT_S, context=context)
    return http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S)
