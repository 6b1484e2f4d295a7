"""What `serve_app up` says while a cluster starts: bars at a terminal, lines in a pipe, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.api.paths import Path as Route
from serve_app.cli.screen import console, is_watched
from serve_app.cli.startup import Application, News, State

MARKS: Mapping[State, str] = {State.WAITING: "·", State.LOADING: "…", State.READY: "✓", State.FAILED: "✗"}


def telling(*, as_json: bool, has_log: bool) -> LineTelling:
    """Return what suits the place where this runs; bars and Ray's own lines would be in each other's way."""
    if as_json:
        return JsonTelling()
    return BarTelling() if is_watched() and has_log else LineTelling()


class LineTelling:
    """A line for each change, for logs and pipes."""

    def begin(self, applications: Sequence[Application], log: str | None) -> None:
        """Tell that it starts; what Ray says is in the log, or None is here."""
        names = ", ".join(each.name for each in applications)
        _say(f"Loading {names}" + (f"; what Ray says is in {log}" if log else ""))

    def update(self, news: Sequence[News]) -> None:
        """Tell who came further."""
        for each in news:
            _say(f"{MARKS[each.application.state]} {_told(each.application)} ({each.seconds:.1f} s)")

    def ready(self, url: str, seconds: float, welcome: str) -> None:
        """Tell that everything answers."""
        self.end()
        _say(welcome)

    def end(self) -> None:
        """Draw nothing more. Safe to repeat."""


class JsonTelling(LineTelling):
    """A JSON object on each line."""

    def begin(self, applications: Sequence[Application], log: str | None) -> None:
        self._say(event="starting", applications=[each.name for each in applications], log=log)

    def update(self, news: Sequence[News]) -> None:
        for each in news:
            found = each.application
            self._say(
                event="application",
                name=found.name,
                state=found.state.value,
                num_running=found.num_running,
                num_wanted=found.num_wanted,
                obstacle=found.obstacle,
                seconds=round(each.seconds, 3),
            )

    def ready(self, url: str, seconds: float, welcome: str) -> None:
        self._say(event="ready", url=url, console=f"{url}{Route.CONSOLE}", seconds=round(seconds, 3))

    def _say(self, **event: object) -> None:
        _say(json.dumps(event, ensure_ascii=False))


class BarTelling(LineTelling):
    """A bar for each application, of its replicas that run."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(finished_text=MARKS[State.READY]), TextColumn("{task.description}", markup=False))
        rest = (BarColumn(bar_width=24), TextColumn("{task.fields[told]}", markup=False), TimeElapsedColumn())
        self._progress = Progress(*columns, *rest, console=console(), refresh_per_second=4)
        self._tasks: dict[str, Any] = {}

    def begin(self, applications: Sequence[Application], log: str | None) -> None:
        self._progress.console.print(f"What Ray says is in {log}\n", soft_wrap=True)
        for each in applications:
            self._tasks[each.name] = self._progress.add_task(each.name, total=each.num_wanted, told=State.WAITING)
        self._progress.start()

    def update(self, news: Sequence[News]) -> None:
        for each in news:
            found = each.application
            if found.name in self._tasks:
                told = found.state.value + (f", {found.num_running} of {found.num_wanted}" if _counts(found) else "")
                completed = found.num_wanted if found.state is State.READY else min(found.num_running, found.num_wanted)
                self._progress.update(self._tasks[found.name], completed=completed, told=told)
                if found.obstacle is not None:
                    self._progress.console.print(f"{found.name}: {found.obstacle}", soft_wrap=True)

    def end(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()


def _told(application: Application) -> str:
    replicas = f", {application.num_running} of {application.num_wanted} replicas" if _counts(application) else ""
    obstacle = "" if application.obstacle is None else f": {application.obstacle}"
    return f"{application.name}: {application.state.value}{replicas}{obstacle}"


def _counts(application: Application) -> bool:
    """Whether how many replicas run is worth a word."""
    return application.state is State.LOADING and application.num_wanted > 1


def _say(line: str) -> None:
    print(line, file=sys.stdout, flush=True)
