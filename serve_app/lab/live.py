"""What changes while one looks at it: in a notebook one output that is renewed, on a terminal text as it comes."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

import pandas
from IPython.core.getipython import get_ipython
from IPython.display import HTML, display
from prometheus_client.parser import text_string_to_metric_families

from serve_app.cli.screen import visible
from serve_app.lab import markup

INTERVAL_S = 0.05
OF_REPLICAS = "serve_app_replica_"


class TerminalLive:
    """Something that changes while one looks at it; on a terminal text as it comes, and of progress only the end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._num_written = 0

    def text(self, prompt: str, text: str) -> None:
        """Show all of a text that is being written."""
        print(visible(text[self._num_written :]), end="", flush=True, file=self._stream)
        self._num_written = len(text)

    def progress(self, done: int, total: int, note: str) -> None:
        """Show how far something is; here nothing, as lines that are written over have no place in a log."""

    def end(self, html: str, text: str) -> None:
        """Show what stays, as HTML or as text."""
        print(visible(text) if not self._num_written else "", flush=True, file=self._stream)


class NotebookLive(TerminalLive):
    """One output of a cell, renewed at most every `interval_s` seconds."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._shown_at = float("-inf")
        self._handle: Any = None

    def text(self, prompt: str, text: str) -> None:
        if self._is_due():
            self._show(markup.block(prompt, markup.escaped(text)))

    def progress(self, done: int, total: int, note: str) -> None:
        if self._is_due():
            self._show(markup.bar(done, total, note))

    def end(self, html: str, text: str) -> None:
        self._show(html)

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now - self._shown_at < self._interval_s:
            return False
        self._shown_at = now
        return True

    def _show(self, html: str) -> None:
        if self._handle is None:
            self._handle = display(HTML(html), display_id=True)
        else:
            self._handle.update(HTML(html))


def live() -> TerminalLive:
    """Return what suits the place where this runs."""
    shell = get_ipython()
    return NotebookLive() if getattr(shell, "kernel", None) is not None else TerminalLive()


def series(text: str) -> pandas.DataFrame:
    """Return a row per sample: its name, its labels in a column each, its value."""
    rows = [
        {"name": sample.name, **sample.labels, "value": sample.value}
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    return pandas.DataFrame(rows)


def replicas(text: str) -> pandas.DataFrame:
    """Return a row per replica: what it has in work, its free blocks, what it has done since it started."""
    rows: dict[str, dict[str, object]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith(OF_REPLICAS) or sample.name.endswith(("_created", "_bucket")):
                continue
            state = sample.labels.get("state")
            name = sample.name.removeprefix(OF_REPLICAS) + (f"_{state}" if state else "")
            row = rows.setdefault(sample.labels["replica"], {"model": sample.labels["model"]})
            row[name.removesuffix("_total")] = sample.value
    return pandas.DataFrame.from_dict(rows, orient="index").rename_axis("replica").sort_index()
