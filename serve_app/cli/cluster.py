"""Runs a new local cluster that serves a file, in a process of its own, until it is interrupted."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def main(file: str, parent: int) -> None:
    """Serve the file. `parent` is who started us: when it dies, we are interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    _be_interrupted_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an image of a crashed process would hold prompts and the pepper
    import ray
    from ray.serve.scripts import cli

    ray.init(address="local", namespace="serve")  # never one that happens to run already, as `serve run` would
    cli.main(args=["run", file])


def _be_interrupted_with(parent: int) -> None:
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGINT))
    if os.getppid() != parent:  # it died before we asked
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
