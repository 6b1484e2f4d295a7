"""Ends the clusters that `serve_app up` of a file has started or left behind, and nothing else."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from serve_app.cli.address import Address, address_of, read_cluster_file
from serve_app.cli.processes import Process, end_runs, send, send_to_parent
from serve_app.cli.screen import CommandFailed, Exit, say, say_json
from serve_app.cli.up import STOP_TIMEOUT_S, runs_of, taken

GRACE_S = STOP_TIMEOUT_S + 10.0  # what `up` allows, and a little more
SERVING_MODULE = "serve_app.cli.cluster"


def end_cluster(file: str, *, port: int | None = None, as_json: bool = False) -> int:
    """End every process of the file's runs, on that port or on any; 0 where none is left. Raises CommandFailed.

    A file that cannot be read names no run: nothing is ended.
    """
    found = runs_of(file, port)
    if not isinstance(read_cluster_file(Path(file)).get("applications"), list):
        raise CommandFailed(_unread(file, found))
    address = address_of(file, port)
    if not found and address.is_taken():
        raise CommandFailed(f"{file} has no run{'' if port is None else f' on port {port}'}: {taken(address, file)}")
    _tell(len(found), file, address, as_json=as_json)
    serving = [each for each in found if SERVING_MODULE in each.command]
    for each in serving:
        _interrupt(each)
    # who serves the file shuts Serve down; where nobody does, nothing would end by itself
    deadline = time.monotonic() + (GRACE_S if serving else 0.0)
    for run in sorted({each.run for each in found if each.run is not None}):
        end_runs(run, grace_s=deadline - time.monotonic())
    return Exit.DONE


def _unread(file: str, found: Sequence[Process]) -> str:
    """Return why nothing was ended, and how to end what once was started with a file of that name."""
    told = f"{file} is no cluster file that can be read, so nothing was ended (`serve_app check {file}` says why)"
    pids = sorted({each.command.rpartition(" ")[2] for each in found if SERVING_MODULE in each.command})
    if pids:
        return f"{told}; its earlier run ends with `kill -INT {' '.join(pids)}`"
    return f"{told}; name the file that `serve_app up` was started with"


def _interrupt(serving: Process) -> None:
    """As a Ctrl-C would: `serve_app up`, whose id is its last argument, or the process itself where that has died."""
    parent = int(serving.command.rpartition(" ")[2])
    if not send_to_parent(serving, parent, signal.SIGINT):
        send(serving, signal.SIGINT)


def _tell(number: int, file: str, address: Address, *, as_json: bool) -> None:
    if as_json:
        say_json({"file": file, "url": str(address), "num_processes": number})
    elif number:
        say(f"Ending {number} processes of `serve_app up {file}`")
    else:
        say(f"Nothing of `serve_app up {file}` is left")
