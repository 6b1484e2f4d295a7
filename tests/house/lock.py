"""Writes requirements.lock: what constraints.txt pins, with the digests of the files that pip finds for this platform.

python -m tests.house.lock

Only what is new is asked for; remove the file first to have it made for another platform. torch is left out: its
builds for CPUs and for each CUDA come from indexes of their own, and have a digest each.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
LOCK = REPOSITORY / "requirements.lock"
LEFT_OUT = ("torch",)
HEAD = """\
# What constraints.txt pins, with digests, for {platform}; written by `make lock`.
# torch is not here: each of its builds (CPU, CUDA 12, CUDA 13, …) has another digest, and only you know which you need.
# Install it first, from the index of your build; then: pip install --no-deps --require-hashes -r requirements.lock
"""


def pins(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Name and version of each line that is no comment."""
    for line in lines:
        name, sign, version = line.strip().partition("==")
        if sign and not name.startswith("#"):
            yield name, version


def main() -> None:
    constraints = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = {f"{name}=={version}" for name, version in pins(constraints) if name not in LEFT_OUT}
    known = [line for line in _known_lines() if _canonical(line.split()[0]) in set(map(_canonical, wanted))]
    missing = [pin for pin in sorted(wanted) if _canonical(pin) not in {_canonical(line.split()[0]) for line in known}]
    lines = sorted({*known, *_found(missing)}, key=str.lower)
    python = ".".join(platform.python_version_tuple()[:2])
    head = HEAD.format(platform=f"{platform.system()} {platform.machine()}, Python {python}")
    LOCK.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


def _known_lines() -> list[str]:
    """Of a lock that is there: a version's digests do not change."""
    lines = LOCK.read_text(encoding="utf-8").splitlines() if LOCK.exists() else []
    return [line for line in lines if "--hash=" in line]


def _found(wanted: list[str]) -> list[str]:
    """Lines of what pip finds."""
    if not wanted:
        return []
    with tempfile.TemporaryDirectory() as folder:
        requirements, report = Path(folder, "requirements.txt"), Path(folder, "report.json")
        requirements.write_text("\n".join(wanted), encoding="utf-8")
        words = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", *words, "--report", str(report), "-r", str(requirements)]
        subprocess.run(command, check=True)
        return [_locked(each) for each in json.loads(report.read_text(encoding="utf-8"))["install"]]


def _canonical(pin: str) -> str:
    return pin.lower().replace("_", "-").replace(".", "-")


def _locked(package: dict[str, Any]) -> str:
    metadata, hashes = package["metadata"], package["download_info"]["archive_info"]["hashes"]
    return f"{metadata['name']}=={metadata['version']} --hash=sha256:{hashes['sha256']}"


if __name__ == "__main__":
    main()
