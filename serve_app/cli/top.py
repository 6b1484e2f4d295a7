"""A table of a running service that is renewed while one looks at it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from serve_app.cli.client import Service
from serve_app.cli.offering import SWITCH, URL, AsJson, Key, Url, service
from serve_app.cli.screen import Exit, console, is_watched, say_json, table, visible

if TYPE_CHECKING:
    from rich.console import Group

PATH, PREFIX = "/metrics", "serve_app_"
EVERYBODY_ELSE = "*"
REPLICA_HEADS = ("model", "replica", "running", "waiting", "cache", "steps/s", "busy")
TENANT_HEADS = ("tenant", "generated/s", "computed/s", "share")
MAX_NAME = 12
"""Last characters of a replica's id that tell it from others."""

Labels = tuple[tuple[str, str], ...]
Series = Mapping[tuple[str, Labels], float]


def top(
    interval: Annotated[float, typer.Option("--interval", "-i", min=0.2, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", metavar=SWITCH, help="Look twice, show that, and end.")] = False,
    url: Url = URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Watch replicas, queues, tokens per second, caches and tenants as they are now."""
    asked = service(url, key)
    boards = _boards(asked, interval)
    if as_json:
        say_json(asdict(next(boards)))
    elif once or not is_watched():
        console().print(drawn(next(boards), asked.url))
    else:
        _watch(boards, asked.url)
    return Exit.DONE


def drawn(seen: Board, url: str) -> Group:
    """Return the board as tables."""
    from rich.console import Group
    from rich.text import Text

    line = Text.assemble(
        (url, "bold"),
        f"   {seen.open_requests} requests open   {seen.generated_per_s:.1f} tokens/s"
        f"   prompts {seen.prompt_per_s:.1f} tokens/s   {seen.cached_share:.0%} of prompts cached"
        f"   {seen.refused} refused",
    )
    waits = "   ".join(f"{model} would wait {wait_s:.1f} s" for model, wait_s in seen.waits_s.items() if wait_s > 0)
    replicas = [
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
    tenants = [
        (each.tenant, f"{each.generated_per_s:.1f}", f"{each.computed_per_s:.1f}", f"{each.share:.0%}")
        for each in seen.tenants
    ]
    tables = table(REPLICA_HEADS, replicas, texts=2), "", table(TENANT_HEADS, tenants, texts=1)
    told = [Text(visible(each), "yellow") for each in (waits, "   ".join(map(_told_of_scale, seen.scales))) if each]
    return Group(line, *told, "", *tables)


def _told_of_scale(scale: ScaleRow) -> str:
    changes = ((scale.starting, "starting"), (scale.draining, "draining"))
    told = "".join(f", {number} {what}" for number, what in changes if number)
    return f"{scale.model}: {scale.running} of {scale.wanted} replicas{told}"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Every series as it was at one time, by name and labels. at_s: by the monotonic clock"""

    at_s: float
    series: Series

    def values(self, name: str, **labels: str) -> list[float]:
        """Return what each series of that name says that has these labels."""
        wanted = set(labels.items())
        return [value for (each, own), value in self.series.items() if each == PREFIX + name and wanted <= set(own)]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of all series of that name that have these labels."""
        return sum(self.values(name, **labels))

    def gained(self, before: Look, name: str, **labels: str) -> float:
        """Return what counters of that name with these labels have gained since an earlier look.

        A series that one of the looks lacks has gained nothing that can be known: two looks may have reached two
        routers, of which each tells of itself alone. One that began anew has gained nothing.
        """
        wanted = set(labels.items())
        return sum(
            max(0.0, value - before.series[each, own])
            for (each, own), value in self.series.items()
            if each == PREFIX + name and wanted <= set(own) and (each, own) in before.series
        )

    def labels(self, name: str, label: str) -> list[str]:
        """Return every value that a label has in the series of that name."""
        return sorted({dict(own).get(label, "") for each, own in self.series if each == PREFIX + name})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRow:
    """One replica. blocks_used, busy: shares of its blocks and of the time"""

    model: str
    replica: str
    running: int
    waiting: int
    blocks_used: float
    steps_per_s: float
    busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    """Replicas of one model: that take requests, are to be there, load, and end with their work."""

    model: str
    running: int
    wanted: int
    starting: int
    draining: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRow:
    """One flow on all replicas. share: of the time that was anybody's"""

    tenant: str
    generated_per_s: float
    computed_per_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """What two looks at a service come to."""

    open_requests: int
    generated_per_s: float
    prompt_per_s: float
    cached_share: float
    refused: int
    waits_s: Mapping[str, float]
    scales: tuple[ScaleRow, ...]
    replicas: tuple[ReplicaRow, ...]
    tenants: tuple[TenantRow, ...]


def read_look(text: str, at_s: float) -> Look:
    """Read the text of GET /metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    series: dict[tuple[str, Labels], float] = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith(("_created", "_bucket"))
    }
    return Look(at_s=at_s, series=series)


def board(before: Look, now: Look) -> Board:
    """Compare two looks; rates are of the time between them."""
    seconds = max(now.at_s - before.at_s, 1e-9)
    prompts = now.value("prompt_tokens_total")
    return Board(
        open_requests=int(now.value("admission_requests_open")),
        generated_per_s=now.gained(before, "replica_flow_generated_tokens_total") / seconds,
        prompt_per_s=now.gained(before, "prompt_tokens_total") / seconds,
        cached_share=now.value("cached_tokens_total") / prompts if prompts else 0.0,
        refused=int(now.value("admission_refusals_total")),
        waits_s={
            model: now.value("admission_predicted_wait_seconds", model=model)
            for model in now.labels("admission_predicted_wait_seconds", "model")
        },
        scales=tuple(_scale(now, model) for model in now.labels("model_replicas", "model")),
        replicas=tuple(_replica(before, now, replica, seconds) for replica in now.labels("replica_blocks", "replica")),
        tenants=_tenants(before, now, seconds),
    )


def _replica(before: Look, now: Look, replica: str, seconds: float) -> ReplicaRow:
    blocks, free = (now.value(f"replica_{name}", replica=replica) for name in ("blocks", "blocks_free"))
    model = next(dict(own)["model"] for _, own in now.series if dict(own).get("replica") == replica)
    return ReplicaRow(
        model=model,
        replica=replica,
        running=int(now.value("replica_sequences_running", replica=replica)),
        waiting=int(now.value("replica_sequences_waiting", replica=replica)),
        blocks_used=1 - free / blocks if blocks else 0.0,
        steps_per_s=now.gained(before, "replica_steps_total", replica=replica) / seconds,
        busy=min(1.0, now.gained(before, "replica_step_seconds_total", replica=replica) / seconds),
    )


def _scale(now: Look, model: str) -> ScaleRow:
    wanted, starting, draining = (
        int(now.value("model_replicas", model=model, state=state)) for state in ("wanted", "starting", "draining")
    )
    running = len(now.values("replica_blocks", model=model))
    return ScaleRow(model=model, running=running, wanted=wanted, starting=starting, draining=draining)


def _tenants(before: Look, now: Look, seconds: float) -> tuple[TenantRow, ...]:
    name = "replica_flow_seconds_total"
    spent = {flow: now.gained(before, name, flow=flow) for flow in now.labels(name, "flow")}
    whole = sum(spent.values())
    rows = [
        TenantRow(
            tenant="all others" if flow == EVERYBODY_ELSE else flow,
            generated_per_s=now.gained(before, "replica_flow_generated_tokens_total", flow=flow) / seconds,
            computed_per_s=now.gained(before, "replica_flow_rows_total", flow=flow) / seconds,
            share=spent[flow] / whole if whole else 0.0,
        )
        for flow in spent
    ]
    return tuple(sorted(rows, key=lambda row: (-row.share, row.tenant)))
