"""Outlives `serve_app up` for a moment: ends what is left of its cluster, however it ended itself.

A process of its own, because a kill -9 lets nothing run in the one that is killed. It knows by a pipe: nobody writes to
it, and the kernel closes it with the process at its other end.
"""

from __future__ import annotations

import signal
import subprocess
import sys

from serve_app.cli.processes import end_runs
from serve_app.core.machine import command, variables

GRACE_S = 15.0


def start_guard(run: str, *, grace_s: float = GRACE_S) -> subprocess.Popen[bytes]:
    """Start a guard of the run; closing its stdin, or dying, has it look after the rest."""
    words = command("serve_app.cli.guard", run, str(grace_s))
    return subprocess.Popen(words, env=variables(), stdin=subprocess.PIPE, start_new_session=True)


def main(run: str, grace_s: float) -> None:
    """Wait for the end of stdin, then `grace_s` seconds for the run's processes to end by themselves, then end them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_runs(run, grace_s=grace_s)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
