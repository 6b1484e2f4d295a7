"""Says what of a cluster's nodes differs, or keeps one from doing the work of another, and how to mend it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serve_app.cli.address import EVERY_INTERFACE, address_of, args_of, read_cluster_file, store_of
from serve_app.cli.doctor.gathering import Verdict, error, exit_code_of, note, warning
from serve_app.cli.doctor.nodes import FAULT_TOLERANCE, Node, Question, connect, look
from serve_app.cli.doctor.report import told
from serve_app.cli.screen import answer
from serve_app.core.machine import is_loopback
from serve_app.tenants.keys import VARIABLE

CLOCKS_APART_S = 1.0
POSTGRES_PORT = 5432
DISK_FULL = 0.95
"""At which Ray puts nothing more on a disk."""
START = ('eval "$(serve_app env)"', "ray start --address=HEAD:6379")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """nodes: all that live;  content: what the cluster file says"""

    nodes: Sequence[Node]
    content: Mapping[str, Any]

    @property
    def answering(self) -> list[Node]:
        return [each for each in self.nodes if not each.silence]

    @property
    def computing(self) -> list[Node]:
        """Those that Ray may give a replica."""
        return [each for each in self.answering if each.num_cpus]


def run(file: str, *, as_json: bool = False) -> int:
    """Look at every node of the cluster, and say what was seen; the exit code. Raises CommandFailed."""
    content = read_cluster_file(Path(file))
    connect()
    port, is_everywhere = address_of(file).port, content.get("proxy_location", "EveryNode") == "EveryNode"
    nodes = look(question_of(content), port, place_of_store(content), has_every_proxy=is_everywhere)
    verdicts = examine(Seen(nodes=nodes, content=content))
    code = exit_code_of(verdicts, was_seen=True)
    lines = [*map(line_of, nodes), *(line for each in verdicts for line in told(each))]
    told_of = {"nodes": [asdict(each) for each in nodes], "findings": [asdict(each) for each in verdicts]}
    answer({"exit_code": code} | told_of, "\n".join(lines or ["no node"]), as_json=as_json)
    return code


def question_of(content: Mapping[str, Any]) -> Question:
    _, pepper = store_of(content) or ("", "")
    return Question(folders=tuple(dict.fromkeys(folders_of(content))), pepper=str(pepper))


def folders_of(content: Mapping[str, Any]) -> Iterator[str]:
    for args in args_of(content):
        adapters = args.get("adapters")
        for named in (args.get("path"), adapters.get("path") if isinstance(adapters, dict) else adapters):
            if named:
                yield str(named)


def place_of_store(content: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return host and port of the store; None where it is a file, or there is none."""
    url = urlsplit((store_of(content) or [""])[0])
    return (url.hostname, url.port or POSTGRES_PORT) if url.hostname else None


def line_of(node: Node) -> str:
    """Return the node in one line."""
    gib = float(1 << 30)
    devices = f"{node.num_cpus:g} CPUs" + (f", {node.num_gpus:g} GPUs {node.gpu}".rstrip() if node.num_gpus else "")
    name = f"{node.name} ({node.address}{', the head' if node.is_head else ''})"
    if node.silence:
        return f"{name}: {devices}, does not answer"
    free = f"{node.free_memory / gib:.1f} GiB of memory and {node.free_disk / gib:.1f} GiB of disk free"
    return f"{name}: {devices}, {free}, clock {node.ahead_s:+.3f} s (known within {node.known_within_s:.3f} s)"


def examine(seen: Seen) -> list[Verdict]:
    """Return what every check finds."""
    usual = ("serve_app doctor --cluster",)
    return [
        replace(found, check=check.__name__.removeprefix("check_"), commands=found.commands or usual)
        for check in CHECKS
        for found in check(seen)
    ]


def check_silent(seen: Seen) -> Iterator[Verdict]:
    for node in seen.nodes:
        if node.silence:
            yield error(
                f"{node.name} runs nothing of this serve_app: {node.silence}",
                "Install the same version there, and start Ray with its Python.",
            )


def check_versions(seen: Seen) -> Iterator[Verdict]:
    for package in dict.fromkeys(name for node in seen.answering for name in node.versions):
        if text := _differing({node.name: node.versions.get(package, "") for node in seen.answering}):
            yield error(
                f"{package}: {text}",
                "Install the same on every node, from one constraints.txt; a stream goes on elsewhere only then.",
                "pip install -c constraints.txt -e .",
            )


def check_environment(seen: Seen) -> Iterator[Verdict]:
    for name in dict.fromkeys(name for node in seen.answering for name in node.environment):
        if name in FAULT_TOLERANCE:
            continue
        if text := _differing({node.name: node.environment.get(name, "") for node in seen.answering}):
            yield error(f"{name}: {text}", "Start Ray on every node behind the same `serve_app env`.", *START)


def check_folders(seen: Seen) -> Iterator[Verdict]:
    for path in dict.fromkeys(path for node in seen.computing for path in node.folders):
        if not path.startswith(("/", "builtin:")) and len(seen.nodes) > 1:
            yield warning(
                f"{path} is not absolute: each node looks in the folder that its `ray start` ran in",
                "Write the path from the root.",
            )
        lacking = [node.name for node in seen.computing if not node.folders[path]]
        if lacking:
            yield error(
                f"{path} is not on {', '.join(lacking)}", "Copy the folder there, or mount the file system that has it."
            )
        having = [node for node in seen.computing if node.folders[path]]
        if text := _differing({node.name: node.folders[path] for node in having}):
            yield error(f"{path} has other files: {text}", "Copy it anew, so that every node has the same.")


def check_store(seen: Seen) -> Iterator[Verdict]:
    if (store := store_of(seen.content)) is None:
        return
    if store[0].startswith("sqlite") and len(seen.answering) > 1:
        yield error(
            "the store is a file of SQLite, which one machine has",
            "Name a store of PostgreSQL: `postgresql+psycopg://user@host/name`.",
        )
    lacking = [node.name for node in seen.answering if not node.pepper]  # Accounts needs no CPU of Ray's
    if lacking:
        yield error(
            f"{', '.join(lacking)} has no pepper, and Accounts may run on any node",
            f"Start Ray there with {VARIABLE}, or copy the file to the same absolute path.",
        )
    if text := _differing({node.name: node.pepper for node in seen.answering if node.pepper}):
        yield error(f"the pepper differs: {text}", "Bring the first one's to every node; keys were made under one.")


def check_reach(seen: Seen) -> Iterator[Verdict]:
    for node in seen.answering:
        for each in node.unreached:
            yield error(
                f"{node.name} does not reach {each}",
                "Open the way: Ray uses every port between nodes, clients and proxies the service's.",
            )
    host = str((seen.content.get("http_options") or {}).get("host", "127.0.0.1"))
    if len(seen.nodes) > 1 and is_loopback(host):
        open_to_all = next(iter(EVERY_INTERFACE))
        yield warning(
            f"http_options.host is {host}: every proxy is reached from its own machine alone",
            f"Ask for keys, and write `host: {open_to_all}`, or put a load balancer on each machine.",
        )


def check_clocks(seen: Seen) -> Iterator[Verdict]:
    ahead = {node.name: node.ahead_s for node in seen.answering}
    if ahead and (apart := max(ahead.values()) - min(ahead.values())) > CLOCKS_APART_S:
        first, last = max(ahead, key=ahead.__getitem__), min(ahead, key=ahead.__getitem__)
        yield warning(
            f"the clock of {first} is {apart:.1f} s ahead of that of {last}",
            "Keep time with NTP: keys end, limits begin anew and the ledger has its hours by each machine's clock.",
            "timedatectl set-ntp true",
        )


def check_disks(seen: Seen) -> Iterator[Verdict]:
    for node in seen.answering:
        if node.free_disk < (1 - DISK_FULL) * node.disk:
            yield warning(
                f"the disk of {node.name} is {1 - node.free_disk / node.disk:.0%} full, and Ray stops to use it",
                "Remove old sessions of Ray that no process has open.",
            )


def check_head(seen: Seen) -> Iterator[Verdict]:
    head = next((each for each in seen.answering if each.is_head), None)
    if head is not None and len(seen.nodes) > 1 and not any(map(head.environment.get, FAULT_TOLERANCE)):
        yield note(
            "the head keeps what Ray knows in its memory: if it dies, the whole service does",
            "Start it with RAY_REDIS_ADDRESS (docs/many-machines.md).",
        )


CHECKS: tuple[Callable[[Seen], Iterator[Verdict]], ...] = (
    check_silent,
    check_versions,
    check_environment,
    check_folders,
    check_store,
    check_reach,
    check_clocks,
    check_disks,
    check_head,
)


def _differing(values: Mapping[str, str]) -> str:
    """Return who has what where not all have the same, else "".  values: by node"""
    found: dict[str, list[str]] = defaultdict(list)
    for name, value in values.items():
        found[value].append(name)
    if len(found) < 2:
        return ""
    return "; ".join(f"{value or 'nothing'} on {', '.join(names)}" for value, names in sorted(found.items()))
