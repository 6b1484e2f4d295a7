"""Follows a cluster that starts, and tells how far it has come, in lines or in JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from serve_app.api.paths import Path as Route


class State(StrEnum):
    """Of one application, in a person's words."""

    WAITING = "waiting"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


STATES: Mapping[str, State] = {
    "NOT_STARTED": State.WAITING,
    "DEPLOYING": State.LOADING,
    "RUNNING": State.READY,
    "DEPLOY_FAILED": State.FAILED,
    "UNHEALTHY": State.LOADING,
    "DELETING": State.WAITING,
}
"""By Serve's own words. One that is unhealthy while it starts is replaced by Serve."""
MARKS: Mapping[State, str] = {State.WAITING: "·", State.LOADING: "…", State.READY: "✓", State.FAILED: "✗"}
UNSCHEDULED = "to be scheduled"
REMEDY = "Lower what they ask for (`ray_actor_options`) or `num_replicas`, or give the cluster more."


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """num_running: of its replicas;  num_wanted: as the file says;  messages: what Serve says of it"""

    name: str
    state: State
    num_running: int = 0
    num_wanted: int = 1
    messages: tuple[str, ...] = ()

    @property
    def obstacle(self) -> str | None:
        """Return what Serve says of replicas that no machine has room for; None where there are none."""
        told = (each for each in self.messages if UNSCHEDULED in each) if self.state is State.LOADING else ()
        return next((f"{each} {REMEDY}" for each in told), None)


class Startup:
    """All applications of a file from the start on."""

    def __init__(self, wanted: Mapping[str, int]) -> None:
        self._wanted = wanted
        self.applications = {
            name: Application(name=name, state=State.WAITING, num_wanted=number) for name, number in wanted.items()
        }

    @property
    def failed(self) -> list[Application]:
        return [each for each in self.applications.values() if each.state is State.FAILED]

    def update(self, told: Mapping[str, Any]) -> list[Application]:
        """Take what Serve tells of some of them; returns who changed its state or its number of replicas, or waits for
        room now.
        """
        news = []
        for name, status in told.items():
            found = _application(name, status, num_wanted=self._wanted.get(name, 1))
            before = self.applications.get(name)
            self.applications[name] = found
            if before is None or _told(before) != _told(found):
                news.append(found)
        return news


class Events:
    """What the process that serves the file writes down for us, a JSON object on each line; reading never waits."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        os.set_blocking(descriptor, False)

    def new(self) -> list[dict[str, Any]]:
        """Return everything whole that came since; nothing where the writer has ended."""
        try:
            while piece := os.read(self._descriptor, 65_536):
                self._rest += piece
        except BlockingIOError:
            pass
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        os.close(self._descriptor)


def replicas_wanted(content: Mapping[str, Any]) -> dict[str, int]:
    """Return how many replicas the file wants of each application, all its deployments together."""
    return {
        str(each.get("name", "default")): max(1, sum(map(_number_of, each.get("deployments") or [{}])))
        for each in content.get("applications") or ()
        if isinstance(each, dict)
    }


def _told(application: Application) -> tuple[object, ...]:
    return application.state, application.num_running, application.obstacle


def _number_of(deployment: Any) -> int:
    number = deployment.get("num_replicas") if isinstance(deployment, dict) else None
    return number if isinstance(number, int) else 1


def _application(name: str, status: Mapping[str, Any], *, num_wanted: int) -> Application:
    messages: Sequence[str] = [status.get("message") or "", *(status.get("deployments") or {}).values()]
    return Application(
        name=name,
        state=STATES.get(status.get("status", ""), State.WAITING),
        num_running=int(status.get("running", 0)),
        num_wanted=num_wanted,
        messages=tuple(filter(None, messages)),
    )


class LineTelling:
    """A line for each change, for logs and pipes."""

    def begin(self, applications: Sequence[Application], log: str | None) -> None:
        """Tell that it starts; what Ray says is in the log, or None is here."""
        names = ", ".join(each.name for each in applications)
        _print(f"Loading {names}" + (f"; what Ray says is in {log}" if log else ""))

    def update(self, news: Sequence[Application], seconds: float) -> None:
        """Tell who came further so many seconds after the start."""
        for each in news:
            _print(f"{MARKS[each.state]} {_line(each)} ({seconds:.1f} s)")

    def ready(self, url: str, seconds: float, welcome: str) -> None:
        """Tell that everything answers."""
        _print(welcome)


class JsonTelling(LineTelling):
    """A JSON object on each line."""

    def begin(self, applications: Sequence[Application], log: str | None) -> None:
        self._write(event="starting", applications=[each.name for each in applications], log=log)

    def update(self, news: Sequence[Application], seconds: float) -> None:
        for found in news:
            told = {name: each for name, each in asdict(found).items() if name != "messages"}
            self._write(event="application", **told, obstacle=found.obstacle, seconds=round(seconds, 3))

    def ready(self, url: str, seconds: float, welcome: str) -> None:
        self._write(event="ready", url=url, console=f"{url}{Route.CONSOLE}", seconds=round(seconds, 3))

    def _write(self, **event: object) -> None:
        _print(json.dumps(event, ensure_ascii=False))


def _line(application: Application) -> str:
    is_counted = application.state is State.LOADING and application.num_wanted > 1
    replicas = f", {application.num_running} of {application.num_wanted} replicas" if is_counted else ""
    obstacle = "" if application.obstacle is None else f": {application.obstacle}"
    return f"{application.name}: {application.state.value}{replicas}{obstacle}"


def _print(line: str) -> None:
    print(line, flush=True)
