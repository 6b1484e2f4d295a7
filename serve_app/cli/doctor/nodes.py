"""Looks at every node of a running Ray cluster from inside: what is installed, where files are, who reaches whom."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from serve_app.catalog.files import CatalogError
from serve_app.catalog.models import locate_model
from serve_app.cli.environment import HAPROXY_SETTINGS, SETTINGS
from serve_app.cli.screen import CommandFailed, Exit
from serve_app.core.machine import ROOT
from serve_app.tenants.errors import TenancyError
from serve_app.tenants.keys import VARIABLE, read_pepper

PACKAGES = ("ray", "torch", "transformers", "peft", "tokenizers", "safetensors", "llguidance", "serve_app")
FAULT_TOLERANCE = ("RAY_REDIS_ADDRESS", "RAY_gcs_storage")
"""Ray's variables, of which a head that may come back has one."""
ANSWER_S = 60.0
"""In which a node answers; Ray starts a process for it."""
REACH_S = 5.0
MOST_CHARS = 500
WHOLE_BYTES = 4 << 20
PIECE_BYTES, PIECES = 1 << 16, 64
"""What is read of a larger file: so many pieces, from its first bytes to its last."""
NUM_LOOKS = 3
"""At a clock; the quickest is believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What each node is asked for.

    folders: paths as the cluster file has them, of models and of adapters
    pepper:  the file that the cluster file names
    """

    folders: tuple[str, ...] = ()
    pepper: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What was seen of one.

    versions:    by package; of `serve_app's files` their digest
    environment: what `serve_app env` sets, and whether the head may come back
    folders:     the digest of each folder that was asked for; "" where it is not there
    pepper:      a digest of the pepper that a process there would use; "" where it has none
    ahead_s:     how far its clock is ahead of that of the machine that asks, and within what that is known
    unreached:   what it cannot connect to, in words
    silence:     why nothing is known of it; "" where it answered
    """

    name: str
    address: str
    is_head: bool = False
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    gpu: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)
    pepper: str = ""
    free_memory: int = 0
    free_disk: int = 0
    disk: int = 1
    ahead_s: float = 0.0
    known_within_s: float = 0.0
    unreached: tuple[str, ...] = ()
    silence: str = ""


class Look:
    """Lives on a node while it is looked at."""

    def facts(self, node: Node, question: Question) -> Node:
        disk = shutil.disk_usage("/tmp")  # nosec B108 # where Ray keeps its logs
        import psutil

        return replace(
            node,
            versions=dict(versions()),
            environment={
                name: os.environ.get(name, "")
                for name in (*(each.name for each in (*SETTINGS, *HAPROXY_SETTINGS)), *FAULT_TOLERANCE)
            },
            folders={path: digest_of(path) for path in question.folders},
            pepper=_pepper(question.pepper),
            free_memory=psutil.virtual_memory().available,
            free_disk=disk.free,
            disk=disk.total,
        )

    def now(self) -> float:
        return time.time()

    def unreached(self, others: Mapping[str, Any], places: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
        """others: those who look, by node, which are called directly;  places: to connect to, by what is there"""
        import ray

        found = []
        for name, other in others.items():
            try:
                ray.get(other.now.remote(), timeout=REACH_S)
            except Exception as error:
                found.append(f"{name}, of which it asked the time ({type(error).__name__})")
        for what, place in places.items():
            try:
                socket.create_connection(place, timeout=REACH_S).close()
            except OSError as error:
                found.append(f"{what} at {place[0]}:{place[1]} ({error})")
        return tuple(found)


def look(question: Question, service_port: int, store: tuple[str, int] | None, *, has_every_proxy: bool) -> list[Node]:
    """Return what is seen of every node that lives. Ray is connected to.

    store: host and port;  has_every_proxy: whether the service is reached on every node, or on the head alone
    """
    import ray

    told = sorted((each for each in ray.nodes() if each["Alive"]), key=lambda each: str(each["NodeManagerAddress"]))
    nodes = {each["NodeID"]: _node(each) for each in told}
    looking = {found: _looking(found) for found in nodes}
    asked = {found: each.facts.remote(nodes[found], question) for found, each in looking.items()}
    for found, answer in asked.items():
        try:
            nodes[found] = replace(ray.get(answer, timeout=ANSWER_S), **_clock(looking[found]))
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            nodes[found] = replace(nodes[found], silence=reason[:MOST_CHARS])
    places = {} if store is None else {"the store": store}
    for node in nodes.values():
        if has_every_proxy or node.is_head:
            places[f"the service of {node.name}"] = (node.address, service_port)
    live = {nodes[found].name: each for found, each in looking.items() if not nodes[found].silence}
    tried = {name: each.unreached.remote(live, places) for name, each in live.items()}
    unreached = {name: _told(answer) for name, answer in tried.items()}
    return [replace(each, unreached=unreached.get(each.name, ())) for each in nodes.values()]


def _told(answer: Any) -> tuple[str, ...]:
    import ray

    try:
        unreached: tuple[str, ...] = ray.get(answer)
    except ray.exceptions.RayError as error:
        return (f"this machine any more ({type(error).__name__})",)
    return unreached


def _looking(node_id: str) -> Any:
    """Start what looks, on this node; it is asked the time while it asks others."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(Look).options(num_cpus=0, max_concurrency=4, scheduling_strategy=there).remote()


def _node(told: Mapping[str, Any]) -> Node:
    resources, labels = told["Resources"], told.get("Labels") or {}
    return Node(
        name=told["NodeManagerHostname"],
        address=told["NodeManagerAddress"],
        is_head="node:__internal_head__" in resources,
        num_cpus=resources.get("CPU", 0.0),
        num_gpus=resources.get("GPU", 0.0),
        gpu=labels.get("ray.io/accelerator-type", ""),
    )


def _clock(looking: Any) -> dict[str, float]:
    import ray

    looks = []
    for _ in range(NUM_LOOKS):
        before = time.time()
        there = ray.get(looking.now.remote(), timeout=REACH_S)
        after = time.time()
        looks.append((after - before, there - (before + after) / 2))
    took, ahead = min(looks)
    return {"ahead_s": ahead, "known_within_s": took / 2}


def versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for each in PACKAGES:
        try:
            yield each, version(each)
        except PackageNotFoundError:
            yield each, "not installed"
    ours = hashlib.sha256()
    for file in sorted((ROOT / "serve_app").rglob("*.py")):
        ours.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    yield "serve_app's files", ours.hexdigest()[:12]


def digest_of(path: str) -> str:
    """Digest a folder: names, sizes and contents, of large files a part; "" where there is none."""
    try:
        folder = locate_model(path)
    except CatalogError:
        return ""
    whole = hashlib.sha256()
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        whole.update(f"{file.relative_to(folder).as_posix()} {file.stat().st_size}\n".encode())
        for piece in _pieces(file):
            whole.update(piece)
    return whole.hexdigest()[:12]


def _pieces(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= WHOLE_BYTES:
            yield opened.read()
            return
        for number in range(PIECES):
            opened.seek((size - PIECE_BYTES) * number // (PIECES - 1))
            yield opened.read(PIECE_BYTES)


def _pepper(file: str) -> str:
    try:
        return hashlib.sha256(b"doctor" + read_pepper(Path(file), os.environ.get(VARIABLE))).hexdigest()[:12]
    except TenancyError:
        return ""


def connect() -> None:
    """Connect to the Ray cluster that RAY_ADDRESS names, else to that of this machine. Raises CommandFailed."""
    import ray

    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        message = f"no Ray cluster answers here ({error}); run this on one of its nodes, behind `serve_app env`"
        raise CommandFailed(message, Exit.UNREACHABLE) from error
