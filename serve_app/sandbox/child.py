"""The sandbox's process: it prepares what all children need and forks one child for each job.

`ForkServer` starts it as a program and sends it, over the socket that is its stdin, a function and its argument.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection

Work = Callable[[Connection], None]
"""What a child does with the connection to its client; EOFError ends it like a return."""
COME = b"come"


def serve_forks() -> None:
    """Fork a child for each connection that arrives, until the other end of stdin is closed."""
    with socket.socket(fileno=0) as control:
        prepare, first = Connection(os.dup(control.fileno())).recv()  # from our own parent process
        work: Work = prepare(first)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            if os.fork() == 0:
                control.close()
                _run(work, descriptors[0])
            os.close(descriptors[0])


def bound_time(*, cpu_s: float, wall_s: float) -> None:
    """Have the kernel end this process after so much CPU or wall time; 0 removes a bound.

    The default action of both signals ends the process, so no Python handler has to run.
    """
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def bound_memory(max_more_bytes: int) -> None:
    """Bound this process, and those it forks later, to so much memory beyond what it has; no core is dumped. Linux."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        num_bytes = int(statm.read().split()[0]) * resource.getpagesize() + max_more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def take_job(connection: Connection) -> bytes:
    """Tell the client this child's process id, and that the job has come: what is lost from then on was lost to it."""
    connection.send_bytes(str(os.getpid()).encode())
    job = connection.recv_bytes()
    connection.send_bytes(COME)
    return job


def _run(work: Work, descriptor: int) -> None:
    status = 1
    try:
        with Connection(descriptor) as connection:
            work(connection)
        status = 0
    except EOFError:  # the client has gone
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve_forks()
