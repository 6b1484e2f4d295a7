"""Who can reach the service a cluster file describes, and whether they are asked for keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from serve_app.check.document import Finding, Path, Severity, spelled
from serve_app.check.ray_environment import AUTH_MODE, HAPROXY, TOKEN, is_behind_haproxy, tls_files
from serve_app.core.machine import is_loopback
from serve_app.deployments.apps import ACCOUNTS_DEPLOYMENT, ROUTER_DEPLOYMENT, router

HAPROXYS_HOST = "0.0.0.0"  # nosec B104 # told, not bound
"""Where HAProxy listens if no host is written."""
PORTS = range(1, 65_536)
WHOLE_NUMBER = re.compile(r"-?\d+")
UNWRITTEN = (
    "HAProxy binds every interface where no host is written; `serve_app up` binds 127.0.0.1, and started otherwise the"
    " service answers nothing but /health"
)
SHOULD_BOUND = (
    "reachable from outside: keys cross the network as they are unless TLS is put in front, and behind Serve's Python"
    " proxy headers may take any time and any size"
)


def check_door(data: dict[str, Any], *, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what lets in who should not be, for a file of any shape.

    environment: that Ray is to be started in, as far as it is known
    """
    options = data.get("http_options")
    written = options.get("host") if isinstance(options, dict) else None
    has_haproxy = is_behind_haproxy(data, environment)
    host = written if written is not None else HAPROXYS_HOST if has_haproxy else "127.0.0.1"
    is_outside = isinstance(host, str) and not is_loopback(host)
    open_doors = list(_open_doors(data))
    for path, reason in open_doors if is_outside else ():
        message = f"{host} is reachable from outside and {reason}: bind 127.0.0.1, or ask for keys"
        severity = Severity.ERROR
        if written is None:
            message += f"; {UNWRITTEN}"
            severity = Severity.WARNING
        yield Finding(path=("http_options", "host"), message=f"{message} ({spelled(path)})", severity=severity)
    if is_outside and not open_doors:
        yield Finding(path=("http_options", "host"), message=f"{host} is {SHOULD_BOUND}", severity=Severity.WARNING)
    if is_outside:
        yield from _check_ray_token(host, environment)
    yield from _check_tls(data, has_haproxy=has_haproxy)
    yield from _check_port(options.get("port") if isinstance(options, dict) else None)
    yield from _check_grpc(data)
    yield from _check_accounts(data)


def _check_ray_token(host: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield an error where whoever reaches the host runs code there. Ray wants its token if nothing is said."""
    found = environment.get(AUTH_MODE, TOKEN)
    if found.lower() != TOKEN:  # as Ray reads it
        message = (
            f'{host} is reachable from outside, and there {AUTH_MODE} must be "{TOKEN}" or not be set, as without it'
            f" whoever reaches Ray's own ports runs code here; found {found!r} in your environment: unset it, or"
            " bind 127.0.0.1"
        )
        yield Finding(path=("http_options", "host"), message=message)


def _check_tls(data: Mapping[str, Any], *, has_haproxy: bool) -> Iterator[Finding]:
    for name in tls_files(data):
        if has_haproxy:
            message = f"HAProxy does not encrypt as Serve starts it: unset {HAPROXY}, or set it to 0"
            yield Finding(path=("http_options", name), message=message)
        else:
            message = f"Serve's Python proxy encrypts, so it accepts the clients: start Ray with {HAPROXY}=0"
            yield Finding(path=("http_options", name), message=message, severity=Severity.NOTE)


def _check_port(port: object) -> Iterator[Finding]:
    if WHOLE_NUMBER.fullmatch(str(port)) and int(str(port)) not in PORTS:
        message = f"must be a TCP port, from {PORTS.start} to {PORTS.stop - 1}; found {port}"
        yield Finding(path=("http_options", "port"), message=message)


def _check_grpc(data: dict[str, Any]) -> Iterator[Finding]:
    options = data.get("grpc_options")
    if isinstance(options, dict) and options.get("grpc_servicer_functions"):
        message = "Serve's gRPC entrance binds every interface and asks nobody for a key: leave it out"
        yield Finding(path=("grpc_options", "grpc_servicer_functions"), message=message)


def _check_accounts(data: dict[str, Any]) -> Iterator[Finding]:
    for path, application in routers_of(data):
        auth, store = _auth_of(application), _store_of(application)
        if auth == "keys" and store is None:
            message = "`auth: keys` needs a store of tenants: set `store`, as in `store: sqlite:///serve_app.db`"
            yield Finding(path=(*path, "args"), message=message)
        if auth == "none" and store is not None:
            message = "tenants and keys are kept, and `auth: none` asks nobody for one"
            yield Finding(path=(*path, "args", "store"), message=message, severity=Severity.WARNING)
        for at, deployment in deployments_of(application, ACCOUNTS_DEPLOYMENT):
            if deployment.get("num_replicas", 1) != 1:
                message = "one replica writes for the whole service; it cannot be several"
                yield Finding(path=(*path, "deployments", at), message=message)


def _open_doors(data: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield where the file serves something that asks for no key, and what that is."""
    for path, application in _applications(data):
        if _is_router(application):
            auth = _auth_of(application)
            if auth == "none" or (auth is None and _store_of(application) is None):
                yield path, "the router asks for no key"
        elif application.get("route_prefix", "/") is not None:
            yield path, "this application has HTTP of its own, which asks for no key"


def routers_of(data: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    return ((path, application) for path, application in _applications(data) if _is_router(application))


def _applications(data: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    applications = data.get("applications")
    for index, application in enumerate(applications if isinstance(applications, list) else ()):
        if isinstance(application, dict):
            yield ("applications", index), application


def _is_router(application: dict[str, Any]) -> bool:
    return str(application.get("import_path")).replace(":", ".") == f"{router.__module__}.{router.__name__}"


def _store_of(application: dict[str, Any]) -> object:
    args = application.get("args")
    return args.get("store") if isinstance(args, dict) else None


def _auth_of(application: dict[str, Any]) -> object:
    return next((config.get("auth") for _, config in router_configs(application, ())), None)


def router_configs(application: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the router's settings in an application at that path, and where they are written."""
    for index, deployment in deployments_of(application, ROUTER_DEPLOYMENT):
        config = deployment.get("user_config")
        if isinstance(config, dict):
            yield (*path, "deployments", index, "user_config"), config


def deployments_of(application: Mapping[str, Any], name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    deployments = application.get("deployments")
    for index, deployment in enumerate(deployments if isinstance(deployments, list) else ()):
        if isinstance(deployment, dict) and deployment.get("name") == name:
            yield index, deployment
