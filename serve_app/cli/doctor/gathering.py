"""What the doctor sees on the machine that a service runs on. It changes nothing, and reads no prompt or answer."""

from __future__ import annotations

import http.client
import os
import ssl
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from serve_app.api.paths import OPEN, AdminPath
from serve_app.api.paths import Path as Route
from serve_app.check.document import Severity
from serve_app.cli.address import Address, address_of, read_cluster_file, store_of
from serve_app.cli.client import check_url
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
from serve_app.core.machine import is_loopback
from serve_app.core.tenants import Tenant
from serve_app.tenants.keys import VARIABLE
from serve_app.tenants.opening import Inspection, inspect_store

RAYS_DASHBOARD = ("dashboard", "Dashboard")
"""Words in the commands of its processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A TCP socket of the cluster that waits for connections. holder: the process that has it open"""

    address: str
    port: int
    holder: Process

    @property
    def is_outside(self) -> bool:
        """Whether others than this machine may reach it, as far as the socket is concerned."""
        return not is_loopback(self.address)

    @property
    def is_dashboard(self) -> bool:
        """Whether Ray's dashboard has it open."""
        return any(word in self.holder.command for word in RAYS_DASHBOARD)

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}, {self.holder}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretFile:
    """A file that holds a secret. mode: its permission bits; is_open: whether others could open it, folders and all"""

    path: str
    mode: int
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything at one moment. What could not be seen is empty or None, and no check takes that for sound or ill.

    file:        name of the cluster file
    url:         where the service was asked; None where nothing answered there
    port:        that the file says
    environment: that the cluster was started with
    listeners:   of the cluster's processes
    doubt:       why nobody need believe the certificate there; None where it is trusted, or there is none
    anonymous:   status by method and path, without a key
    ray_answers: of Ray's dashboard without its token, by URL
    store:       of tenants and keys; None where the file names none
    token:       the file of Ray's token
    open_logs:   files among the logs of Ray's session that others may read
    """

    file: str = "cluster.yaml"
    url: str | None = None
    port: int = 8000
    environment: Mapping[str, str] = field(default_factory=dict)
    listeners: tuple[Listener, ...] = ()
    doubt: str | None = None
    anonymous: Mapping[tuple[str, str], int] = field(default_factory=dict)
    ray_answers: Mapping[str, int] = field(default_factory=dict)
    store: Inspection | None = None
    token: SecretFile | None = None
    open_logs: tuple[str, ...] = ()

    @property
    def was_seen(self) -> bool:
        """Whether a service ran."""
        return self.url is not None

    @property
    def asks_nobody(self) -> bool:
        """Whether the service lists its models to somebody without a key."""
        return self.anonymous.get(("GET", "/v1/models")) == 200

    @property
    def doors(self) -> tuple[Listener, ...]:
        """Where the service itself listens."""
        return tuple(each for each in self.listeners if each.port == self.port)

    @property
    def open_doors(self) -> list[Listener]:
        """Where others than this machine reach the service."""
        return [each for each in self.doors if each.is_outside]

    @property
    def tenants(self) -> Sequence[Tenant]:
        return () if self.store is None else self.store.tenants


SOUND, ILL, SUSPECT, NOT_SEEN = 0, 1, 3, 4
"""Exit codes. 2 is that of a command line that was not understood."""
RESTART = (
    "ray get-auth-token --generate > /dev/null",
    'eval "$(serve_app env)"',
    "ray stop",
    "ray start --head --dashboard-host=127.0.0.1",
)
"""Shell lines that start Ray anew on one machine, with its token and our environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One finding of one check.

    severity: an error lets somebody do what they must not; a warning may, with something else; a note is to be known
    found:    what was seen, with its figures
    mend:     what to do about it, a whole sentence
    commands: that do it, each a line of shell; where a check gives none, `serve_app check` of the file
    check:    its name, which stays the same over versions; it stands in the list of checks alone
    """

    severity: Severity
    found: str
    mend: str
    commands: tuple[str, ...] = ()
    check: str = ""


def verdict(severity: Severity, found: str, mend: str, *commands: str) -> Verdict:
    """Return a finding of the check that calls this."""
    return Verdict(severity=severity, found=found, mend=mend, commands=commands)


error, warning, note = (partial(verdict, severity) for severity in Severity)


def exit_code_of(verdicts: Iterable[Verdict], *, was_seen: bool) -> int:
    """Return 1 where there is an error, 3 where there are warnings alone, 0 where neither.

    was_seen: whether a service ran and was looked at; where none did, what is otherwise sound is 4
    """
    severities = {each.severity for each in verdicts}
    if Severity.ERROR in severities:
        return ILL
    if Severity.WARNING in severities:
        return SUSPECT
    return SOUND if was_seen else NOT_SEEN


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
            url = Address(host="127.0.0.1" if each.is_outside else each.address, port=each.port)
            for path in RAY_PATHS:
                answer = ask(str(url), "GET", path)
                if answer is not None and (answer.status != 200 or "json" in answer.kind):
                    yield f"{url}{path}", answer.status  # exporters of metrics answer any path with metrics


def _store(content: Mapping[str, Any], environment: Mapping[str, str]) -> Inspection | None:
    if (found := store_of(content)) is None:
        return None
    secret = environment.get(VARIABLE, os.environ.get(VARIABLE))
    return inspect_store(found[0], pepper_file=found[1], environment=secret)


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
