"""Hosts of a test's own: each has its network, processes, name, /tmp and /dev/shm to itself; a bridge joins them.

They share the file system beside these, so that the package and its models are at the same place on each.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

NETWORK = "198.18.77"
"""Of the addresses that are kept for tests of networks (RFC 2544)."""
OURS = 254
"""The last part of the test's own address."""
BEGINS = """
mount --bind "$1" /tmp && mount -t tmpfs -o size=512m tmpfs /dev/shm && hostname "$2" && ip link set lo up && echo up
trap : TERM
until ! read; do :; done
"""
"""The first process of a host: it waits for those whose parents have died, and ends with the test that it reads."""
WHAT_IS_NEEDED = ("unshare", "nsenter", "ip", "redis-server", "setpriv")


def can_have_hosts() -> bool:
    """Whether we are root on a Linux that gives us namespaces and bridges."""
    if sys.platform != "linux" or os.getuid() or not all(map(shutil.which, WHAT_IS_NEEDED)):
        return False
    tried = ("unshare", "--net", "--pid", "--mount", "--uts", "--fork", "ip", "link", "add", "tried", "type", "bridge")
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


class Network:
    """A bridge with an address of ours, and hosts on it. A server that they all reach listens on `address`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"{NETWORK}.{OURS}"
        self._bridge = f"sa{os.getpid()}"
        self.hosts: dict[str, Host] = {}
        self._numbers: dict[str, int] = {}
        for each in Path("/sys/class/net").glob("sa[0-9]*"):  # of a test that was killed; its hosts died with it
            if each.name[2:].isdecimal() and not psutil.pid_exists(int(each.name[2:])):
                run("ip", "link", "delete", each.name)
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self.address}/24", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")

    def begin(self, name: str) -> Host:
        """A host that is switched on: one that was before gets its address and its disk again."""
        number = self._numbers.setdefault(name, len(self._numbers) + 1)
        host = self.hosts[name] = Host(name, number, self.folder / name, self._bridge)
        return host

    def end(self) -> None:
        for host in self.hosts.values():
            host.kill()
        run("ip", "link", "delete", self._bridge)


class Host:
    """One of them, from when it is switched on until it is killed."""

    def __init__(self, name: str, number: int, folder: Path, bridge: str) -> None:
        self.name, self.number, self.folder = name, number, folder
        self.address = f"{NETWORK}.{number}"
        self._plug = f"{bridge}-{number}"
        temporary = folder / "tmp"
        (temporary / "home").mkdir(parents=True, exist_ok=True)
        kinds = ("--net", "--pid", "--mount", "--uts", "--mount-proc")
        command = ["unshare", *kinds, "--fork", "--kill-child", "bash", "-c", BEGINS, "init", str(temporary), name]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n", "the host did not come up"
        (init,) = psutil.Process(self._holder.pid).children()
        self.pid = init.pid
        run("ip", "link", "add", self._plug, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        run("ip", "link", "set", self._plug, "master", bridge, "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def command(self, *words: str) -> list[str]:
        """What runs the words on the host."""
        return ["nsenter", "--target", str(self.pid), "--net", "--pid", "--mount", "--uts", *words]

    def run(self, *words: str, environment: Mapping[str, str] = MappingProxyType({})) -> str:
        """What they say; fails with it where they fail."""
        return run(*self.command(*words), environment=self.environment | dict(environment))

    @property
    def environment(self) -> dict[str, str]:
        """As a login gives it, with this checkout's programs."""
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/tmp/home",
            "LANG": "C.UTF-8",
        }

    @property
    def home(self) -> Path:
        return self.folder / "tmp" / "home"

    def processes(self) -> list[psutil.Process]:
        """All of them, as the test sees them; none of a host that was killed."""
        ours, found = self._network_of(self.pid), []
        for each in psutil.process_iter(["cmdline"]):
            if ours and self._network_of(each.pid) == ours:
                found.append(each)
        return found

    @staticmethod
    def _network_of(pid: int) -> str:
        try:
            return os.readlink(f"/proc/{pid}/ns/net")
        except OSError:
            return ""

    def set_link(self, *, is_up: bool) -> None:
        """Pull its cable, or plug it in: what is down loses every packet, and nobody is told."""
        run("ip", "link", "set", self._plug, "up" if is_up else "down")

    def kill(self) -> None:
        """Every process at once, as with its power; a link that is up still says goodbye for them."""
        if self._holder.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._holder.wait()


def run(*words: str, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(words, env=environment, capture_output=True, check=False, text=True)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout
