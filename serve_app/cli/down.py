"""Ends the cluster that an earlier `serve_app up` left behind, and nothing else."""

from __future__ import annotations

import signal

from serve_app.cli.address import Address, address_of
from serve_app.cli.exits import CommandFailed, Exit
from serve_app.cli.processes import Process, end_runs, processes_of_runs, send, send_to_parent
from serve_app.cli.screen import say, say_json
from serve_app.cli.up import STOP_TIMEOUT_S, run_prefix, taken

GRACE_S = STOP_TIMEOUT_S + 10.0  # what `up` allows, and a little more
SERVING_MODULE = "serve_app.cli.cluster"


def end_cluster(file: str, *, as_json: bool = False) -> int:
    """End every process of the runs on the file's port; 0 where none is left there. Raises CommandFailed."""
    address = address_of(file)
    found = processes_of_runs(run_prefix(address))
    if not found and address.is_taken():
        raise CommandFailed(taken(address, file))
    _tell(len(found), address, as_json=as_json)
    serving = [each for each in found if SERVING_MODULE in each.command]
    for each in serving:
        _interrupt(each)
    # who serves the file shuts Serve down; where nobody does, nothing would end by itself
    end_runs(run_prefix(address), grace_s=GRACE_S if serving else 0.0)
    return Exit.DONE


def _interrupt(serving: Process) -> None:
    """As a Ctrl-C would: `serve_app up`, whose id is its last argument, or the process itself where that has died."""
    parent = int(serving.command.rpartition(" ")[2])
    if not send_to_parent(serving, parent, signal.SIGINT):
        send(serving, signal.SIGINT)


def _tell(number: int, address: Address, *, as_json: bool) -> None:
    if as_json:
        say_json({"url": str(address), "num_processes": number})
    elif number:
        say(f"Ending {number} processes of `serve_app up` on {address}")
    else:
        say(f"Nothing of `serve_app up` is left on {address}")
