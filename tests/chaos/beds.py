"""Where parts of the service run: on this machine alone, or on three hosts of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from tests.cluster.kills import begun
from tests.nodes.hosts import Host
from tests.nodes.service import HEAD, WORKERS, Service

REPLICAS = "ray::ServeReplica:"
TITLES: Mapping[str, str] = {
    "model replica": f"{REPLICAS}demo:Model",
    "router": f"{REPLICAS}router:Router",
    "proxy": "haproxy",
    "controller": "ray::ServeController",
    "Accounts": f"{REPLICAS}router:Accounts",
    "GCS": "gcs_server",
}
"""What the title of each part's processes begins with."""
HOSTS: Mapping[str, str] = {"node": WORKERS[0], "head": HEAD}
CLOCK = Path(__file__).with_name("clock.c")
CLOCK_BYTES = 1 << 22
DISK_BYTES = 400 << 20
ENDED = {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}


class Bed:
    """A service with two routers and two replicas, and what a fault has to know of it.

    urls:   of its proxies;  key: of a tenant;  admin: the key of an administrator
    whole:  how many processes of each part there are without a fault
    """

    urls: Sequence[str]
    key: str
    admin: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.whole: dict[str, int] = {}

    def end(self) -> None: ...

    def processes(self) -> list[psutil.Process]:
        raise NotImplementedError

    def pids(self, part: str) -> list[int]:
        """Those of the part that run: neither dead nor stopped. The oldest is first."""
        found = []
        for each in self.processes():
            try:
                title = each.cmdline()[0]
                if (title.startswith(TITLES[part]) or Path(title).name == TITLES[part]) and each.status() not in ENDED:
                    found.append((each.create_time(), each.pid))
            except (psutil.Error, IndexError):
                continue
        return [pid for _, pid in sorted(found)]

    def disk(self, part: str) -> Path:
        """The folder on whose disk the part writes."""
        raise NotImplementedError

    def clock(self, part: str) -> tuple[Path, slice]:
        """The file of the clock of the part's machine, and which of its bytes are the part's."""
        raise NotImplementedError

    def parts(self) -> dict[str, int]:
        return {part: len(self.pids(part)) for part in TITLES}

    def is_full(self) -> bool:
        """Whether every part is there, and at each door every router knows every replica and answers."""
        if any(number < self.whole[part] for part, number in self.parts().items()):
            return False
        return all(self._is_good(url) for url in self.urls for _ in range(2 * self.whole["router"]))

    def _is_good(self, url: str) -> bool:
        body = {"model": "demo", "prompt": "Once", "max_tokens": 2}
        try:
            with httpx.Client(base_url=url, timeout=30, headers={"authorization": f"Bearer {self.admin}"}) as client:
                knows = len(client.get("/live").json().get("replicas", ())) == self.whole["model replica"]
                headers = {"authorization": f"Bearer {self.key}"}
                return knows and client.post("/v1/completions", json=body, headers=headers).status_code == 200
        except (httpx.HTTPError, ValueError):
            return False


class OneMachine(Bed):
    """`serve_app up`. Its store and Ray's logs are on a small disk of their own; the clock of each process, too."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        disk = folder / "disk"
        mount(disk)
        places = {"RAY_TMPDIR": str(disk), "TMPDIR": str(disk)}
        self.house, self.admin, keys = begun(disk, environment=places | with_clock(folder, seen_as=folder))
        self.key, self.urls = keys["acme"], [self.house.run.url]

    def end(self) -> None:
        self.house.run.end()
        unmount(self.folder / "disk")

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(each.pid) for each in self.house.run.processes() if psutil.pid_exists(each.pid)]

    def disk(self, part: str) -> Path:
        return self.folder / "disk"

    def clock(self, part: str) -> tuple[Path, slice]:
        (pid, *_) = self.pids(part)
        return self.folder / "clock", slice(pid, pid + 1)


class ThreeHosts(Bed):
    """A head and two workers, each with a proxy, a disk and a clock of its own; the store and Redis are beside them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name in (HEAD, *WORKERS):
            mount(self.disk(name))
            variables = with_clock(self.disk(name), seen_as=Path("/tmp"))
        self.service = Preloaded(folder, variables)
        self.service.start()
        self.service.until(self.service.is_full, "full")
        self.admin, self.key, self.urls = self.service.admin, self.service.key, self.service.urls()

    def end(self) -> None:
        self.service.end()
        for name in (HEAD, *WORKERS):
            unmount(self.disk(name))

    def host(self, part: str) -> Host:
        return self.service.network.hosts[HOSTS[part]]

    def processes(self) -> list[psutil.Process]:
        return [each for host in self.service.network.hosts.values() for each in host.processes()]

    def pids(self, part: str) -> list[int]:
        return [each.pid for each in self.host(part).processes()] if part in HOSTS else super().pids(part)

    def disk(self, part: str) -> Path:
        return self.folder / HOSTS.get(part, part) / "tmp"

    def clock(self, part: str) -> tuple[Path, slice]:
        return self.disk(part) / "clock", slice(0, CLOCK_BYTES)


class Preloaded(Service):
    """Its commands, and with them Ray and all that it starts, have these variables."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        super().__init__(folder)
        self._variables = dict(variables)

    def shell(self, host: Host, *words: str, environment: dict[str, str] | None = None) -> str:
        return super().shell(host, *words, environment=self._variables | (environment or {}))


def with_clock(folder: Path, *, seen_as: Path) -> dict[str, str]:
    """Variables of processes that have a clock which is not off yet. seen_as: the folder, as they see it"""
    (folder / "clock").write_bytes(bytes(CLOCK_BYTES))
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(folder / "clock.so"), str(CLOCK)], check=True)
    return {"LD_PRELOAD": str(seen_as / "clock.so"), "CHAOS_CLOCK": str(seen_as / "clock")}


def mount(folder: Path) -> None:
    """A small disk of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], check=True)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
