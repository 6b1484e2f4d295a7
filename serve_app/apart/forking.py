"""The process's own side: it makes ready what all children need, and forks for those who ask."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

First = TypeVar("First")
Work = Callable[[Connection], None]
"""What a child does with the connection to who asked for it; EOFError is an end like any other."""


def serve_forks(prepare: Callable[[First], Work]) -> None:
    """Serve until the other end of the socket that is our input is closed.

    prepare: from what `ForkServer` was given to what every child does
    """
    with socket.socket(fileno=0) as control:
        work = prepare(Connection(os.dup(control.fileno())).recv())  # from the process that started this one
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            if os.fork() == 0:
                control.close()
                _carry_out(work, descriptors[0])
            os.close(descriptors[0])


def tell_who(connection: Connection) -> None:
    """Tell the other side which process this is; before anything of its work is looked at."""
    connection.send_bytes(str(os.getpid()).encode())


def _carry_out(work: Work, descriptor: int) -> None:
    status = 1
    try:
        with Connection(descriptor) as connection:
            work(connection)
        status = 0
    except EOFError:  # nobody waits for it any more
        status = 0
    finally:
        os._exit(status)
