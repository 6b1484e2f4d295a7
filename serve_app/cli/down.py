"""Ends the cluster that an earlier `serve_app up` left behind, and nothing else."""

from __future__ import annotations

import signal
import sys

from serve_app.cli.address import Address, address_of
from serve_app.cli.processes import Process, end_runs, processes_of_runs, send, send_to_parent
from serve_app.cli.up import STOP_TIMEOUT_S, run_prefix, taken

GRACE_S = STOP_TIMEOUT_S + 10.0  # what `up` allows, and a little more
SERVING_MODULE = "serve_app.cli.cluster"


def end_cluster(file: str) -> int:
    """End every process of the runs on the file's port; 0 where none is left there."""
    address = address_of(file)
    found = processes_of_runs(run_prefix(address))
    if not found:
        return _nothing_to_end(address, file)
    print(f"Ending {len(found)} processes of `serve_app up` on {address}", flush=True)
    serving = [each for each in found if SERVING_MODULE in each.command]
    for each in serving:
        _interrupt(each)
    # who serves the file shuts Serve down; where nobody does, nothing would end by itself
    end_runs(run_prefix(address), grace_s=GRACE_S if serving else 0.0)
    return 0


def _interrupt(serving: Process) -> None:
    """As a Ctrl-C would: `serve_app up`, whose id is its last argument, or the process itself where that has died."""
    parent = int(serving.command.rpartition(" ")[2])
    if not send_to_parent(serving, parent, signal.SIGINT):
        send(serving, signal.SIGINT)


def _nothing_to_end(address: Address, file: str) -> int:
    if address.is_taken():
        print(f"serve_app: {taken(address, file)}", file=sys.stderr)
        return 1
    print(f"Nothing of `serve_app up` is left on {address}")
    return 0
