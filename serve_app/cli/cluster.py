"""Serves a file in a new local cluster or in one that runs, in a process of its own, until it is interrupted."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

PRIVATE = 0o077
"""What Ray's processes write, logs with prompts among it, is their owner's alone; Ray opens its folders to all."""
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
TELL_S = 0.5
TELL_SETTLED_S = 5.0
"""Where all run. To ask takes 30 ms of this process, which checks every setting anew."""
RUNNING = "RUNNING"
LOCAL = "local"
LOOPBACK = "127.0.0.1"
"""Where the service listens if no host is written; HAProxy itself would bind every interface."""
ROUTER_DEPLOYMENT = "Router"
DRAIN_S = 15.0
"""For requests that are open; routers end those that last longer."""
FAREWELL_S = 6.0
"""For routers to tell their clients that it ends, and to be gone."""
FAREWELL_POLL_S = 0.2
HEARD_WITHIN_S = 0.2


def main(address: str, file: str, port: int, events: int, parent: int, *, has_dashboard: bool) -> None:
    """Serve the file on the port.

    address: of the Ray cluster; `local` starts one

    events: the descriptor that how far it came is written to, a JSON object on each line
    parent: who started us; when it dies, we are interrupted
    has_dashboard: of a cluster that is started: ten processes, 0.2 GB and, on two cores, 4 to 5 s of the start
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    _be_interrupted_with(parent)
    os.umask(PRIVATE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an image of a crashed process would hold prompts and the pepper
    import click
    import ray
    from ray import serve
    from ray.serve.scripts import cli

    # never a cluster that happens to run already, as `serve run` would
    ray.init(address=address, namespace="serve", include_dashboard=has_dashboard if address == LOCAL else None)
    if address != LOCAL:
        _refuse_what_serves()
    _start(file, port)
    threading.Thread(target=_tell, args=(events,), name="events", daemon=True).start()

    def deploy() -> None:
        try:
            cli.main(["run", "--non-blocking", file], standalone_mode=False)
        except click.Abort:  # what click makes of a KeyboardInterrupt
            raise KeyboardInterrupt from None

    hold_until_interrupted(deploy, _let_routers_go)
    serve.shutdown()


def _refuse_what_serves() -> None:
    """What is served already would end with us."""
    from ray import serve

    if names := ", ".join(sorted(serve.status().applications)):
        raise RuntimeError(f"The cluster serves {names} already; `serve deploy` of the new file changes that.")


def _start(file: str, port: int) -> None:
    """Start Serve on the port, with the file's `logging_config`.

    `serve run` would do so on the file's port and without that, so that a proxy wrote a line for each request. It finds
    Serve running then. What is set besides is as `run` has it.
    """
    import yaml
    from ray import serve
    from ray.serve.schema import ServeDeploySchema

    with open(file, encoding="utf-8") as text:
        schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    host = schema.http_options.host if "host" in schema.http_options.model_fields_set else LOOPBACK
    serve.start(
        proxy_location=schema.proxy_location,
        http_options={**schema.http_options.model_dump(), "host": host, "port": port},
        grpc_options=schema.grpc_options.model_dump(),
        logging_config=schema.logging_config,
        controller_options=schema.controller_options,
    )


def hold_until_interrupted(begin: Callable[[], object], farewell: Callable[[], None]) -> None:
    """Begin, and sleep until a SIGINT; then take leave. A second SIGINT breaks that off, and none after it is heard.

    To be called in the main thread. It sleeps briefly, as a signal that another thread takes wakes nobody.
    """
    with suppress(KeyboardInterrupt):
        try:
            begin()
            while True:
                time.sleep(HEARD_WITHIN_S)
        except KeyboardInterrupt:
            with suppress(Exception):
                farewell()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _let_routers_go() -> None:
    """Serve ends its proxies with its applications, and streams with them. Routers are drained and deleted before: what
    is open is answered, and a stream that lasts too long ends with an event that says why.
    """
    from ray import serve

    routers = [
        name
        for name, each in serve.status().applications.items()
        if ROUTER_DEPLOYMENT in each.deployments and _told_of(each)["status"] == RUNNING
    ]
    for name in routers:
        try:
            asyncio.run(_drain(name))
        except Exception:
            traceback.print_exc()
        serve.delete(name, _blocking=False)
    deadline = time.monotonic() + FAREWELL_S
    while time.monotonic() < deadline and serve.status().applications.keys() & set(routers):
        time.sleep(FAREWELL_POLL_S)


async def _drain(name: str) -> None:
    """Have every replica of this router drain; it may take a moment until Serve has told us of them."""
    from ray import serve
    from ray.serve.exceptions import DeploymentUnavailableError

    handle = serve.get_deployment_handle(ROUTER_DEPLOYMENT, name)
    deadline = time.monotonic() + FAREWELL_S
    while time.monotonic() < deadline:
        try:
            drained = handle.broadcast("drain", DRAIN_S)
            await drained.results_async(timeout_s=DRAIN_S + FAREWELL_S, return_exceptions=True)
        except DeploymentUnavailableError:
            await asyncio.sleep(FAREWELL_POLL_S)
        else:
            return


def _tell(events: int) -> None:
    """Write down what Serve says of its applications whenever that has changed."""
    from ray import serve

    before = None
    while True:
        told = {name: _told_of(each) for name, each in serve.status().applications.items()}
        if told != before:
            os.write(events, json.dumps(told).encode() + b"\n")
            before = told
        time.sleep(pause_after(told))


def pause_after(told: Mapping[str, Mapping[str, object]]) -> float:
    """Seconds until the next look; told: what was told of each application"""
    is_settled = bool(told) and all(each["status"] == RUNNING for each in told.values())
    return TELL_SETTLED_S if is_settled else TELL_S


def _told_of(application: Any) -> dict[str, object]:
    deployments = application.deployments
    return {
        "status": str(getattr(application.status, "value", application.status)),
        "message": application.message,
        "running": sum(
            number
            for each in deployments.values()
            for state, number in each.replica_states.items()
            if getattr(state, "value", state) == RUNNING
        ),
        "deployments": {name: each.message for name, each in deployments.items() if each.message},
    }


def _be_interrupted_with(parent: int) -> None:
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGINT))
    if os.getppid() != parent:  # it died before we asked
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]), has_dashboard=bool(int(sys.argv[1])))
