"""Keeps what was measured, a line of JSON for each run: when, of which commit, on which processor, and the figures."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.figures import Figures

FILE = Path(__file__).with_name("history.jsonl")
NAMES = ("model name", "Model")
"""Of the line of /proc/cpuinfo that says which processor it is."""
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
"""That decide how a model is computed."""
DIGITS = 4


def append(figures: Figures, *, what: dict[str, Any], file: Path = FILE) -> None:
    """Add a line for this checkout on this machine. what: how it was measured, beside the figures"""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(entry(figures, what=what)) + "\n")


def entry(figures: Figures, *, what: dict[str, Any]) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC)
    rounded = {name: None if value is None else float(f"{value:.{DIGITS}g}") for name, value in figures.items()}
    return {"date": f"{now:%Y-%m-%dT%H:%MZ}", "commit": commit(), "cpu": processor(), **what, "figures": rounded}


def read(file: Path = FILE) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def last_alike(what: dict[str, Any], file: Path = FILE) -> dict[str, Any] | None:
    """The latest run that was measured so, on a processor like this one; None where there is none."""
    cpu = processor()
    alike = (
        [each for each in read(file) if each["cpu"] == cpu and what.items() <= each.items()] if file.exists() else []
    )
    return alike[-1] if alike else None


def commit() -> str:
    """Of the checkout, with a `+` where files differ from it."""
    return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else "")


def processor() -> str:
    """Its name, how many of it there are, and what it can compute with."""
    told: dict[str, str] = {}
    if (file := Path("/proc/cpuinfo")).exists():
        pairs = (line.partition(":") for line in file.read_text(encoding="utf-8").splitlines())
        told = {name.strip(): value.strip() for name, _, value in pairs}
    name = next((told[name] for name in NAMES if name in told), platform.processor() or platform.machine())
    flags = told.get("flags", told.get("Features", "")).split()
    known = [each for each in INSTRUCTIONS if each in flags]
    return ", ".join([f"{os.cpu_count()} x {name}", *known])


def _git(*words: str) -> str:
    ran = subprocess.run(["git", *words], cwd=FILE.parent, capture_output=True, text=True, check=False)
    return "unknown" if ran.returncode else ran.stdout.strip()
