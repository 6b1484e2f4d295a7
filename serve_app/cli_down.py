"""Ends the cluster that an earlier `serve_app up` left behind, and nothing else."""

from __future__ import annotations

import signal
import sys

from serve_app.cli_address import Address, address_of
from serve_app.cli_processes import Process, end_runs, processes_of_runs, send
from serve_app.cli_up import STOP_TIMEOUT_S, run_prefix, taken

SERVING_MODULE = "serve_app.cli_cluster"


def end_cluster(file: str) -> int:
    """End every process of the runs on the file's port; 0 where none is left there."""
    address = address_of(file)
    found = processes_of_runs(run_prefix(address))
    if not found:
        return _nothing_to_end(address, file)
    print(f"Ending {len(found)} processes of `serve_app up` on {address}", flush=True)
    serving = [each for each in found if SERVING_MODULE in each.command]
    for each in serving:
        send(each, signal.SIGINT)
    end_runs(run_prefix(address), grace_s=_grace_s(serving))
    return 0


def _grace_s(serving: list[Process]) -> float:
    """Who serves the file shuts Serve down; where nobody does, nothing would end by itself."""
    return STOP_TIMEOUT_S if serving else 0.0


def _nothing_to_end(address: Address, file: str) -> int:
    if address.is_taken():
        print(f"serve_app: {taken(address, file)}", file=sys.stderr)
        return 1
    print(f"Nothing of `serve_app up` is left on {address}")
    return 0
