"""The environment that a cluster is started with: each setting, its value and the reason."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from serve_app.check.ray_environment import AUTH_MODE, HAPROXY, HAPROXY_BINARY, TOKEN, haproxy_program

RUN_VARIABLE = "SERVE_APP_RUN"
"""Inherited by every process of a cluster that `serve_app up` started; its value names the run."""
LOOPBACK = "127.0.0.1"
INNER_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
}
"""Where HAProxy and Serve's fallback proxy listen beside the service, unless these variables say otherwise."""
IN_PLACE = Path(__file__).with_name("haproxy.sh")
"""What Serve starts as HAProxy: its template, changed in what Serve has no setting for."""
OURS_VARIABLE = "SERVE_APP_HAPROXY"
"""Which program `haproxy.sh` becomes."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One environment variable. Ray reads it in every process, so it is set before the first one starts."""

    name: str
    value: str
    reason: str


# fmt: off
SETTINGS = (
    Setting(AUTH_MODE, TOKEN, "Ray's own ports want a token, ~/.ray/auth_token, the same on every"
            " node; `up` makes it, else `ray get-auth-token --generate`"),
    Setting("RAY_USAGE_STATS_ENABLED", "0", "nothing is reported to anyone"),
    Setting("RAY_worker_niceness", "0", "Ray's default of 15 leaves the service whatever other processes do not want"),
    Setting("RAY_memory_monitor_refresh_ms", "0", "at 95 % of a node's memory Ray would kill every replica, whoever"
            " uses the memory; the kernel's own killer takes the largest process"),
    Setting("RAY_worker_oom_score_adjustment", "0", "Ray's default of 1000 has the kernel kill replicas before any"
            " other process, however small they are"),
    Setting("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1", "a dead proxy is replaced after three failed checks; the"
            " default of 10 s refuses connections for half a minute"),
    Setting("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", "268435456", "what a router sends a replica, and back, is"
            " images and long prompts too; with the default of 4 MiB such a request fails as if every replica were"
            " lost"),
    Setting("RAY_SERVE_PROXY_USE_GRPC", "1", "what a proxy and a router say to each other goes over gRPC, not through"
            " Ray's object store, which takes twice the processor time per token"),
    Setting("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "0", "Serve's choice of a replica is made in the thread that asks"
            " for it; in one of its own each piece of an answer wakes two threads"),
    Setting("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.25", "the controller looks after everything ten times a second by"
            " default, which takes it and Ray 6 % of a core without a request; so 3 %"),
    Setting("RAY_SERVE_SLOW_STARTUP_WARNING_S", "10", "replicas that no machine has room for are told so soon; the"
            " default is 30 s"),
    Setting("RAY_gcs_rpc_server_reconnect_timeout_s", "600", "a head that died and keeps its state elsewhere has ten"
            " minutes to come back; after the default of one minute every other node ends itself"),
    Setting("OMP_WAIT_POLICY", "PASSIVE", "idle threads of torch sleep, they do not spin"),
    Setting("SPT_NOENV", "1", "the titles that Ray gives its processes leave their environment readable, which tells"
            " runs apart"),
)
LOCAL_SETTINGS = (
    Setting("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0", "one machine only: Ray binds its ports to loopback, the"
            " exporters of metrics that want no token too"),
)
"""For a cluster that no other machine joins."""
HAPROXY_SETTINGS = (
    Setting(HAPROXY, "1", "HAProxy accepts clients instead of Serve's Python proxy"),
    Setting("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1", "gRPC between replicas"),
    Setting("RAY_SERVE_LOG_TO_STDERR", "1", "a process's lines go to Ray's log of it; where Serve takes them, each"
            " costs a walk of the stack"),
    Setting("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1", "the default of 30 s is for load balancers far"
            " away"),
    Setting("RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "900", "the default cuts streams two minutes after a change of"
            " replicas"),
)
# fmt: on

PLAIN_PROXY = Setting(HAPROXY, "0", "Serve's Python proxy accepts clients")


def loopback_haproxy(base: Mapping[str, str]) -> tuple[Setting, ...]:
    """Return what has Serve start HAProxy so; nothing where there is none, or where the caller has named one."""
    program = None if another_haproxy(base) is not None else haproxy_program(base)
    if program is None:
        return ()
    reason = (
        "HAProxy's statistics on loopback, 20 s for a client's headers, and 503 with Retry-After where no router can be"
        " reached: Serve has no setting for any of them"
    )
    return (
        Setting(HAPROXY_BINARY, str(IN_PLACE), reason),
        Setting(OURS_VARIABLE, program, "the HAProxy that this becomes"),
    )


def another_haproxy(base: Mapping[str, str]) -> str | None:
    """Return the program that the caller has named in its place, which binds what Serve says."""
    named = base.get(HAPROXY_BINARY)
    return None if named == str(IN_PLACE) else named


def environment(
    base: Mapping[str, str], *, has_haproxy: bool, port: int | None = None, is_local: bool = True
) -> dict[str, str]:
    """Return what a cluster's processes are started with; what the caller has set already stays.

    port:     that the service itself is to listen on
    is_local: whether no other machine joins the cluster
    """
    if not is_local:
        return {each.name: each.value for each in cluster_settings(base, has_haproxy=has_haproxy)} | dict(base)
    settings = (*LOCAL_SETTINGS, *cluster_settings(base, has_haproxy=has_haproxy))
    return {each.name: each.value for each in settings} | (_free_ports(port) if has_haproxy else {}) | dict(base)


CLAIMS: dict[tuple[str, int], int] = {}
"""Descriptors of names that tell others, until this process ends, which ports it gave away: listeners come later."""


def claim(host: str, port: int) -> bool:
    """Claim a port for this process, and return whether no other has; it may be claimed again."""
    if (host, port) in CLAIMS or sys.platform != "linux":
        return True
    name = socket.socket(socket.AF_UNIX)  # ends with its process; one set of names for each network, as of ports
    try:
        name.bind(f"\0serve_app port {host}:{port}")
    except OSError as error:
        name.close()
        return error.errno != errno.EADDRINUSE
    CLAIMS[host, port] = name.detach()
    return True


def release(host: str, port: int) -> None:
    """Let others claim a port again."""
    if (host, port) in CLAIMS:
        os.close(CLAIMS.pop((host, port)))


def _free_ports(service: int | None) -> dict[str, str]:
    """Return a port for each of Serve's own listeners beside the service: the usual one, or one that is free.

    Two services on one machine must not share them. HAProxy would send a client of one to the other's fallback.
    """
    ports = {}
    with ExitStack() as held:
        for name, usual in INNER_PORTS.items():
            port = usual
            while port == service or not _is_had(port, held):
                with socket.create_server((LOOPBACK, 0)) as server:
                    port = server.getsockname()[1]
            ports[name] = str(port)
    return ports


def _is_had(port: int, held: ExitStack) -> bool:
    """Return whether nobody listens at a port or has claimed it; this process claims it."""
    try:
        held.enter_context(socket.create_server((LOOPBACK, port)))
    except OSError:
        return False
    return claim(LOOPBACK, port)


def cluster_settings(base: Mapping[str, str], *, has_haproxy: bool) -> tuple[Setting, ...]:
    """Return what a cluster of any size wants, on a machine with this environment."""
    return (*SETTINGS, *(HAPROXY_SETTINGS + loopback_haproxy(base) if has_haproxy else (PLAIN_PROXY,)))


def shell_lines(base: Mapping[str, str], *, has_haproxy: bool) -> Iterator[str]:
    """Yield the settings as a shell reads them, for clusters that are started by other means."""
    yield "umask 077  # what Ray writes, logs with prompts among it, is its owner's alone"
    for each in cluster_settings(base, has_haproxy=has_haproxy):
        yield f"export {each.name}={shlex.quote(each.value)}  # {each.reason}"


def overridden(base: Mapping[str, str], *, has_haproxy: bool) -> Iterator[str]:
    """Yield a line for each setting that the caller's environment has otherwise."""
    for each in (*LOCAL_SETTINGS, *cluster_settings(base, has_haproxy=has_haproxy)):
        if base.get(each.name, each.value) != each.value:
            yield f"{each.name}={base[each.name]} from your environment, not {each.value}: {each.reason}"
    if has_haproxy and (named := another_haproxy(base)) is not None:
        yield f"{HAPROXY_BINARY}={named} from your environment: its statistics are open on every interface"
