"""A table of a running service that is renewed while one looks at it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from serve_app.cli.client import Service
from serve_app.cli.exits import Exit
from serve_app.cli.screen import console, is_watched, say_json, table, visible
from serve_app.cli.series import PREFIX, Board, Look, board, read_look

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

PATH = "/metrics"
REPLICA_HEADS = ("model", "replica", "running", "waiting", "cache", "steps/s", "busy")
TENANT_HEADS = ("tenant", "generated/s", "computed/s", "share")
MAX_NAME = 12
"""Last characters of a replica's id that tell it from others."""


def watch_service(service: Service, *, interval_s: float, is_once: bool, as_json: bool) -> int:
    """Until Ctrl-C; a pipe and a program see two looks and what lies between. Raises ServiceFailed."""
    boards = _boards(service, interval_s)
    if as_json:
        say_json(asdict(next(boards)))
    elif is_once or not is_watched():
        console().print(drawn(next(boards), service.url))
    else:
        _watch(boards, service.url)
    return Exit.DONE


def drawn(seen: Board, url: str) -> Group:
    """The board as tables."""
    from rich.console import Group
    from rich.text import Text

    line = Text.assemble(
        (url, "bold"),
        f"   {seen.open_requests} requests open   {seen.generated_per_s:.1f} tokens/s"
        f"   prompts {seen.prompt_per_s:.1f} tokens/s   {seen.cached_share:.0%} of prompts cached"
        f"   {seen.refused} refused",
    )
    waits = "   ".join(f"{model} would wait {wait_s:.1f} s" for model, wait_s in seen.waits_s.items() if wait_s > 0)
    return Group(line, *([Text(visible(waits), "yellow")] if waits else []), "", _replicas(seen), "", _tenants(seen))


def _watch(boards: Iterator[Board], url: str) -> None:
    from rich.live import Live
    from rich.text import Text

    try:
        with Live(Text(f"Looking at {url}…"), console=console(), auto_refresh=False, screen=False) as live:
            for seen in boards:
                live.update(drawn(seen, url), refresh=True)
    except KeyboardInterrupt:
        return  # how a person ends it


def _boards(service: Service, interval_s: float) -> Iterator[Board]:
    before = _look(service)
    while True:
        time.sleep(interval_s)
        now = _look(service)
        yield board(before, now)
        before = now


def _look(service: Service) -> Look:
    return read_look(service.text(PATH, word=PREFIX), time.monotonic())


def _replicas(seen: Board) -> Table:
    rows = [
        (
            each.model,
            each.replica[-MAX_NAME:],
            str(each.running),
            str(each.waiting),
            f"{each.blocks_used:.0%}",
            f"{each.steps_per_s:.0f}",
            f"{each.busy:.0%}",
        )
        for each in seen.replicas
    ]
    return table(REPLICA_HEADS, rows, texts=2)


def _tenants(seen: Board) -> Table:
    rows = [
        (each.tenant, f"{each.generated_per_s:.1f}", f"{each.computed_per_s:.1f}", f"{each.share:.0%}")
        for each in seen.tenants
    ]
    return table(TENANT_HEADS, rows, texts=1)
