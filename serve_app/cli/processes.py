"""The processes of this machine, by psutil: whose run each belongs to, and who holds a port.

A run is told by a variable in its processes' environment. It cannot go stale as a file of process ids would, and a
process that was given a dead one's id does not carry it.

As a program it is the guard of a run, which ends what whoever started the run leaves behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from serve_app.cli.environment import RUN_VARIABLE
from serve_app.core.machine import command, variables

MAX_COMMAND_CHARS = 120
POLL_S = 0.1
GRACE_S = 15.0
"""For the processes of a run to end by themselves, where whoever started it has died."""


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
    """Return every process of this user's runs whose names start so. Root could read everybody's, and does not."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.uids().real == os.getuid() and (run := _run_of(each.pid)) is not None and run.startswith(prefix):
                found.append(_process(each))
    return found


def is_running(process: Process) -> bool:
    """Return whether it has not ended; its id may be another process's by now."""
    return _run_of(process.pid) == process.run


def listener_on(port: int) -> Process | None:
    """Return who listens on the TCP port, on any address; None where nobody does, or another user's process."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:  # macOS shows them to root alone
        return None
    held = (each.pid for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port == port)
    for pid in held:
        if pid is not None:
            with suppress(psutil.Error):
                return _process(psutil.Process(pid))
    return None


def children_of(ancestor: int) -> list[Process]:
    """Return a process, and all that it and its children have started and not left behind."""
    with suppress(psutil.Error):
        process = psutil.Process(ancestor)
        return sorted(_found([process, *process.children(recursive=True)]), key=lambda each: each.pid)
    return []


def ancestors_of(process: Process) -> Iterator[Process]:
    """Yield its parent, that one's, and so on; not the first process of the machine."""
    with suppress(psutil.Error):
        yield from _found([each for each in psutil.Process(process.pid).parents() if each.pid > 1])


def with_words(*words: str) -> list[Process]:
    """Return every process whose command has all of them."""
    return [each for each in _found(list(psutil.process_iter())) if all(word in each.command for word in words)]


def environment_of(pid: int) -> dict[str, str]:
    """Return what a process was started with; empty where it is another user's, or has put a title in that place."""
    try:
        return dict(psutil.Process(pid).environ())
    except (psutil.Error, OSError):
        return {}


def listeners_of(process: Process) -> Iterator[tuple[str, int]]:
    """Yield address and port of each TCP socket that it has open and that waits for connections."""
    with suppress(psutil.Error):
        for each in psutil.Process(process.pid).net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN:
                yield each.laddr.ip, each.laddr.port


def send(process: Process, number: signal.Signals) -> bool:
    """Send the signal unless the process has ended and its id is another one's by now; return whether it was sent."""
    return is_running(process) and _signal(process.pid, number)


def send_to_parent(process: Process, parent: int, number: signal.Signals) -> bool:
    """Send the signal to the process of the id `parent`, unless it is the other one's parent no more."""
    with suppress(psutil.Error):
        return psutil.Process(process.pid).ppid() == parent and _signal(parent, number)
    return False


def end_runs(prefix: str, *, grace_s: float = 0.0) -> int:
    """Kill what is left of these runs after `grace_s` seconds, until nothing is; return how many were killed."""
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


def start_guard(run: str, *, grace_s: float = GRACE_S) -> subprocess.Popen[bytes]:
    """Start a guard of the run; closing its stdin, or dying, has it look after the rest."""
    words = command("serve_app.cli.processes", run, str(grace_s))
    return subprocess.Popen(words, env=variables(), stdin=subprocess.PIPE, start_new_session=True)


def main(run: str, grace_s: float) -> None:
    """Wait for the end of stdin, then `grace_s` seconds for the run's processes to end by themselves, then end them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_runs(run, grace_s=grace_s)


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        psutil.Process(pid).send_signal(number)
    except psutil.Error:
        return False
    return True


def _found(processes: list[psutil.Process]) -> Iterator[Process]:
    for each in processes:
        with suppress(psutil.Error):
            yield _process(each)


def _process(found: psutil.Process) -> Process:
    words = found.cmdline()
    program = Path(words[0]).name if words else ""
    return Process(pid=found.pid, program=program, command=" ".join(words).strip(), run=_run_of(found.pid))


def _run_of(pid: int) -> str | None:
    return environment_of(pid).get(RUN_VARIABLE)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
