"""Runs faults against parts of a service that works, and writes what clients saw into docs/faults.md.

    make chaos                      every fault of every part, two hours
    make chaos ONLY=kill:router     one row; `kill` and `:router` are all of that fault, or of that part
    make chaos ONLY=kill:GCS,link   several
    make chaos ONLY=short           three rows within five minutes
    make chaos ONLY="missing --minutes 8"   rows that the page has not yet, as many as there is time for

It wants root, a C compiler, Redis and PostgreSQL. Ends with 1 where something was wrong, silent or not explained,
or where the service was not whole again.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path

import openai

from tests.chaos.asking import KINDS, Asked, Seen, ask_all, judged
from tests.chaos.beds import HOSTS, TITLES, Bed, OneMachine, ThreeHosts
from tests.chaos.page import Row, faults_in, row, rows_of, written

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
LASTS_S = 20.0
FULL_WITHIN_S = 180.0


def kill(bed: Bed, part: str) -> None:
    """One process, or a whole host as with its power, which is switched on again."""
    if isinstance(bed, ThreeHosts):
        bed.host(part).kill()
        time.sleep(LASTS_S)
        bed.service.begin(HOSTS[part])
    else:
        os.kill(bed.pids(part)[0], signal.SIGKILL)


def stop(bed: Bed, part: str) -> None:
    pids = bed.pids(part) if part in HOSTS else bed.pids(part)[:1]
    send(pids, signal.SIGSTOP)
    time.sleep(LASTS_S)
    send(pids, signal.SIGCONT)


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def unplug(bed: Bed, part: str) -> None:
    assert isinstance(bed, ThreeHosts)
    bed.host(part).set_link(is_up=False)
    time.sleep(LASTS_S)
    bed.host(part).set_link(is_up=True)


def fill_disk(bed: Bed, part: str) -> None:
    """Whatever is freed meanwhile is taken at once."""
    file, until = bed.disk(part) / "filling", time.monotonic() + LASTS_S
    with file.open("wb", buffering=0) as filling:
        while time.monotonic() < until:
            try:
                while filling.write(bytes(1 << 16)):
                    pass
            except OSError:
                time.sleep(0.1)
    file.unlink()


def set_clock(hours: int, bed: Bed, part: str) -> None:
    file, bytes_of_part = bed.clock(part)
    for now in (hours, 0):
        with file.open("r+b") as clock:
            clock.seek(bytes_of_part.start)
            clock.write(now.to_bytes(1, signed=True) * (bytes_of_part.stop - bytes_of_part.start))
        time.sleep(LASTS_S if now else 0)


FAULTS: Mapping[str, Callable[[Bed, str], None]] = {
    "kill": kill,
    "stop": stop,
    "link": unplug,
    "disk": fill_disk,
    "clock+1h": lambda bed, part: set_clock(1, bed, part),
    "clock-1h": lambda bed, part: set_clock(-1, bed, part),
}
OF_MACHINES = {"link", "disk"}
"""Faults that a process alone does not have."""
ROWS: list[Row] = [
    *((fault, part) for fault in FAULTS if fault not in OF_MACHINES for part in TITLES),
    ("disk", "all of one machine"),
    *((fault, part) for fault in FAULTS for part in HOSTS),
]
ENDS: set[Row] = {("kill", "GCS")}
"""After these the service of one machine has ended: `serve_app up` says so, and whoever started it starts it again."""
SHORT: set[Row] = {("kill", "model replica"), ("kill", "router"), ("stop", "model replica")}


async def seen_of(
    bed: Bed, clients: list[openai.AsyncOpenAI], at: Row, undisturbed: Asked
) -> tuple[dict[str, Seen], float | None]:
    """What clients saw, and after how many seconds the service was whole again; None: it was not."""
    fault, part = at

    def strike() -> float | None:
        start = time.monotonic()
        FAULTS[fault](bed, part)
        while time.monotonic() - start < FULL_WITHIN_S:
            if bed.is_full():
                return time.monotonic() - start
            time.sleep(0.25)
        return None

    asked, full_s = await ask_all(clients, meanwhile=lambda: asyncio.to_thread(strike))
    return {kind: judged(kind, asked, undisturbed) for kind in KINDS}, full_s


async def run(bed: Bed, rows: list[Row], until: float) -> list[str]:
    """What must not be. Rows are left to another service where this one is not whole again."""
    clients = [
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=bed.key, max_retries=0, timeout=None) for url in bed.urls
    ]
    await ask_all(clients)  # whatever is slow the first time
    undisturbed, _ = await ask_all(clients)
    bed.whole, found = bed.parts(), []
    while rows and time.monotonic() < until:
        at = rows.pop(0)
        seen, full_s = await seen_of(bed, clients, at, undisturbed)
        cells = row(seen, full_s)
        print(*at, *cells, sep=" | ", flush=True)
        PAGE.write_text(written(PAGE.read_text("utf-8"), {at: cells}, ROWS), "utf-8")
        found += [f"{' of '.join(at)}: {what}" for what in faults_in(cells, is_the_end=at in ENDS)]
        if full_s is None:
            break
    return found


def wanted(only: str) -> list[Row]:
    if only == "short":
        return [at for at in ROWS if at in SHORT]
    if only == "missing":
        return [at for at in ROWS if at not in rows_of(PAGE.read_text("utf-8"))]
    asked = [each.partition(":")[::2] for each in only.split(",")]
    return [at for at in ROWS if any(fault in ("", at[0]) and part in ("", at[1]) for fault, part in asked)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="?", default="")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no row later")
    options = parser.parse_args()
    until, found = time.monotonic() + 60 * options.minutes, list[str]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for on_hosts, rows in ((key, list(of)) for key, of in groupby(wanted(options.only), lambda at: at[1] in HOSTS)):
        while rows and time.monotonic() < until:
            with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
                bed = (ThreeHosts if on_hosts else OneMachine)(Path(folder))
                try:
                    found += asyncio.run(run(bed, rows, until))
                finally:
                    bed.end()
    sys.exit("\n".join(found) or 0)


if __name__ == "__main__":
    main()
