"""The environment that a cluster is started with: each setting, its value and the reason."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from serve_app.check import ray_token
from serve_app.cli.haproxy import SERVES_VARIABLE, another_haproxy, loopback_haproxy

RUN_VARIABLE = "SERVE_APP_RUN"
"""Inherited by every process of a cluster that `serve_app up` started; its value names the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One environment variable. Ray reads it in every process, so it is set before the first one starts."""

    name: str
    value: str
    reason: str


SETTINGS = (
    Setting(
        name=ray_token.VARIABLE,
        value=ray_token.TOKEN,
        reason="Ray's own ports want a token, ~/.ray/auth_token, the same on every node; `up` makes it, else `ray"
        " get-auth-token --generate`",
    ),
    Setting(name="RAY_USAGE_STATS_ENABLED", value="0", reason="nothing is reported to anyone"),
    Setting(
        name="RAY_worker_niceness",
        value="0",
        reason="Ray's default of 15 leaves the service whatever other processes do not want",
    ),
    Setting(
        name="RAY_memory_monitor_refresh_ms",
        value="0",
        reason="at 95 % of a node's memory Ray would kill every replica, whoever uses the memory; the kernel's own"
        " killer takes the largest process",
    ),
    Setting(
        name="RAY_worker_oom_score_adjustment",
        value="0",
        reason="Ray's default of 1000 has the kernel kill replicas before any other process, however small they are",
    ),
    Setting(
        name="RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S",
        value="1",
        reason="a dead proxy is replaced after three failed checks; the default of 10 s refuses connections for half"
        " a minute",
    ),
    Setting(
        name="RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH",
        value="serve_app.http.proxy:protect",
        reason="a client has 20 s and 64 KiB for its headers, and may offer HTTP/2; Serve itself bounds neither, and"
        " drops the body behind such an offer",
    ),
    Setting(
        name="SERVE_APP_PROXY_MAX_REQUESTS",
        value="256",
        reason="a proxy refuses more requests at once by itself, with 503 and Retry-After; passed on, a thousand at"
        " once would keep proxy and router busy for seconds",
    ),
    Setting(
        name="RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH",
        value="268435456",
        reason="what a router sends a replica, and back, is images and long prompts too; with the default of 4 MiB such"
        " a request fails as if every replica were lost",
    ),
    Setting(
        name="RAY_SERVE_PROXY_USE_GRPC",
        value="1",
        reason="what a proxy and a router say to each other goes over gRPC, not through Ray's object store, which takes"
        " twice the processor time per token",
    ),
    Setting(
        name="RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP",
        value="0",
        reason="Serve's choice of a replica is made in the thread that asks for it; in one of its own each piece of an"
        " answer wakes two threads",
    ),
    Setting(
        name="RAY_SERVE_CONTROL_LOOP_INTERVAL_S",
        value="0.25",
        reason="the controller looks after everything ten times a second by default, which takes it and Ray 6 % of a"
        " core without a request; so 3 %",
    ),
    Setting(
        name="RAY_SERVE_SLOW_STARTUP_WARNING_S",
        value="10",
        reason="replicas that no machine has room for are told so soon; the default is 30 s",
    ),
    Setting(name="OMP_WAIT_POLICY", value="PASSIVE", reason="idle threads of torch sleep, they do not spin"),
    Setting(
        name="SPT_NOENV",
        value="1",
        reason="the titles that Ray gives its processes leave their environment readable, which tells runs apart",
    ),
)
LOCAL_SETTINGS = (
    Setting(
        name="RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
        value="0",
        reason="one machine only: Ray binds its ports to loopback, the exporters of metrics that want no token too",
    ),
)
"""For a cluster that no other machine joins."""

FAST_SETTINGS = (
    Setting(name="RAY_SERVE_ENABLE_HA_PROXY", value="1", reason="HAProxy instead of Serve's Python proxy"),
    Setting(name="RAY_SERVE_THROUGHPUT_OPTIMIZED", value="1", reason="gRPC between replicas"),
    Setting(
        name="RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
        value="1",
        reason="the default of 30 s is for load balancers far away",
    ),
    Setting(
        name="SERVE_APP_PROXY_PAUSE_S",
        value="0",
        reason="HAProxy's connections are anybody's: none is left unread because of who was refused on it",
    ),
    Setting(
        name="SERVE_APP_PROXY_SHORTCUT",
        value="0",
        reason="a router speaks HTTP itself: its streams have no proxy of Serve's to go past",
    ),
    Setting(
        name="RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S",
        value="900",
        reason="the default cuts streams two minutes after a change of replicas",
    ),
)


def environment(base: Mapping[str, str], *, is_fast: bool) -> dict[str, str]:
    """What a local cluster's processes are started with; what the caller has set already stays."""
    settings = {each.name: each.value for each in (*LOCAL_SETTINGS, *cluster_settings(is_fast=is_fast))}
    return settings | (loopback_haproxy(base) if is_fast else {}) | dict(base)


def cluster_settings(*, is_fast: bool) -> tuple[Setting, ...]:
    """What a cluster of any size wants."""
    return (*SETTINGS, *(FAST_SETTINGS if is_fast else ()))


def shell_lines(*, is_fast: bool) -> Iterator[str]:
    """The settings as a shell reads them, for clusters that are started by other means."""
    yield "umask 077  # what Ray writes, logs with prompts among it, is its owner's alone"
    for each in cluster_settings(is_fast=is_fast):
        yield f"export {each.name}={shlex.quote(each.value)}  # {each.reason}"


def overridden(base: Mapping[str, str], *, is_fast: bool) -> Iterator[str]:
    """A line for each setting that the caller's environment has otherwise."""
    for each in (*LOCAL_SETTINGS, *cluster_settings(is_fast=is_fast)):
        if base.get(each.name, each.value) != each.value:
            yield f"{each.name}={base[each.name]} from your environment, not {each.value}: {each.reason}"
    if is_fast and (named := another_haproxy(base)) is not None:
        yield f"{SERVES_VARIABLE}={named} from your environment: its statistics are open on every interface"
