"""The processes of this machine, as /proc tells of them: whose run each belongs to, and who holds a port.

A run is told by a variable in its processes' environment. It cannot go stale as a file of process ids would, and a
process that was given a dead one's id does not carry it. Where there is no /proc nothing is found.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from serve_app.cli.environment import RUN_VARIABLE

PROC = Path("/proc")
LISTENING = "0A"  # as the kernel writes TCP_LISTEN
MAX_COMMAND_CHARS = 120
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that was there when it was looked for.

    program: file name of what it runs, or the title that it has given itself
    command: that with its arguments, for a person
    run:     None where `serve_app up` did not start it
    """

    pid: int
    program: str
    command: str
    run: str | None

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command[:MAX_COMMAND_CHARS]})"


def processes_of_runs(prefix: str = "") -> list[Process]:
    """Every process of this user's runs whose names start so."""
    found = (_process(pid) for pid in _pids() if _is_ours(pid))
    return [each for each in found if each.run is not None and each.run.startswith(prefix)]


def is_running(process: Process) -> bool:
    """Whether it has not ended; its id may be another process's by now."""
    return _run_of(process.pid) == process.run


def listener_on(port: int) -> Process | None:
    """Who listens on the TCP port, on whichever address; None where nobody does, or somebody else's process."""
    sockets = {f"socket:[{inode}]" for inode in _listening_sockets(port)}
    if not sockets:
        return None
    return next((_process(pid) for pid in _pids() if _holds(pid, sockets)), None)


def children_of(ancestor: int) -> list[Process]:
    """A process, and all that it and its children have started and not left behind."""
    parents = {pid: _parent_of(pid) for pid in _pids()}
    family = {ancestor}
    while found := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= found
    return [_process(pid) for pid in sorted(family) if pid in parents]


def ancestors_of(process: Process) -> Iterator[Process]:
    """Its parent, that one's, and so on; not the first process of the machine."""
    pid = _parent_of(process.pid)
    while pid is not None and pid > 1:
        yield _process(pid)
        pid = _parent_of(pid)


def with_words(*words: str) -> list[Process]:
    """Every process whose command has all of them."""
    return [each for each in map(_process, _pids()) if all(word in each.command for word in words)]


def environment_of(process: Process) -> dict[str, str]:
    """What it was started with; empty where it is another user's, or has put a title in that place."""
    entries = (each.decode(errors="replace").partition("=") for each in _read(process.pid, "environ").split(b"\0"))
    return {name: value for name, sign, value in entries if sign}


def core_limit_of(process: Process) -> int | None:
    """Bytes of the largest image that the kernel may write of it when it crashes; None is without a bound."""
    for line in _read(process.pid, "limits").decode(errors="replace").splitlines():
        if line.startswith("Max core file size"):
            soft = line.removeprefix("Max core file size").split()[0]
            return None if soft == "unlimited" else int(soft)
    return 0


def listeners_of(process: Process) -> Iterator[tuple[str, int]]:
    """Address and port of each TCP socket that it has open and that waits for connections."""
    held = _sockets_of(process.pid)
    for inode, address, port in _all_listening():
        if f"socket:[{inode}]" in held:
            yield address, port


def send(process: Process, number: signal.Signals) -> bool:
    """Send the signal, unless the process has ended and its id is another one's by now; returns whether it was sent."""
    return _signal(process.pid, number, is_meant=lambda: is_running(process))


def send_to_parent(process: Process, parent: int, number: signal.Signals) -> bool:
    """Send the signal to the process of the id `parent`, unless it is the other one's parent no more."""
    return _signal(parent, number, is_meant=lambda: _parent_of(process.pid) == parent)


def end_runs(prefix: str, *, grace_s: float = 0.0) -> int:
    """Kill what is left of these runs after `grace_s` seconds, until nothing is; returns how many were killed."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and processes_of_runs(prefix):
        time.sleep(POLL_S)
    killed: set[int] = set()
    while left := processes_of_runs(prefix):
        for each in left:
            send(each, signal.SIGKILL)
        killed |= {each.pid for each in left}
        time.sleep(POLL_S)
    return len(killed)


def _signal(pid: int, number: signal.Signals, *, is_meant: Callable[[], bool]) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not is_meant():  # asked after the descriptor was opened: from here on it is the same process
            return False
        signal.pidfd_send_signal(descriptor, number)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _pids() -> Iterator[int]:
    if PROC.is_dir():
        yield from (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())


def _is_ours(pid: int) -> bool:
    """Root could read everybody's."""
    try:
        return (PROC / str(pid)).stat().st_uid == os.getuid()
    except OSError:
        return False


def _process(pid: int) -> Process:
    words = _read(pid, "cmdline").decode(errors="replace").split("\0")
    return Process(pid=pid, program=Path(words[0]).name, command=" ".join(words).strip(), run=_run_of(pid))


def _run_of(pid: int) -> str | None:
    marker = f"{RUN_VARIABLE}=".encode()
    entries = _read(pid, "environ").split(b"\0")
    return next((each[len(marker) :].decode() for each in entries if each.startswith(marker)), None)


def _parent_of(pid: int) -> int | None:
    """None where the process has ended."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()  # after the name, which may hold anything: state, parent
    return int(fields[1]) if fields else None


def _read(pid: int, name: str) -> bytes:
    """Empty where the process is another user's, or has ended."""
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def _listening_sockets(port: int) -> Iterator[str]:
    """Their inodes, of both families."""
    return (inode for inode, _, at in _all_listening() if at == port)


def _all_listening() -> Iterator[tuple[str, str, int]]:
    """Inode, address and port of every TCP socket that waits for connections, of both families."""
    for table in ("tcp", "tcp6"):
        try:
            rows = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()  # slot, local address, remote address, state, ..., inode
            if fields[3] == LISTENING:
                address, _, port = fields[1].rpartition(":")
                yield fields[9], _written(address), int(port, 16)


def _written(address: str) -> str:
    """As a person writes it. The kernel has it as words of 32 bits in this machine's order."""
    words = (int(address[at : at + 8], 16) for at in range(0, len(address), 8))
    return str(ipaddress.ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words)))


def _holds(pid: int, sockets: set[str]) -> bool:
    return not sockets.isdisjoint(_sockets_of(pid))


def _sockets_of(pid: int) -> set[str]:
    """What the process has open; empty where it is another user's."""
    folder = PROC / str(pid) / "fd"
    try:
        return {_link(folder / name) for name in os.listdir(folder)}
    except OSError:
        return set()


def _link(file: Path) -> str:
    """Empty where it was closed meanwhile."""
    try:
        return os.readlink(file)
    except OSError:
        return ""
