"""What the doctor has seen, before anything is thought of it: sockets, answers, files, environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from serve_app.check.document import Severity
from serve_app.cli.processes import Process
from serve_app.core.machine import is_loopback
from serve_app.core.tenants import Tenant
from serve_app.tenants.opening import Inspection

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
