"""The service on hosts of a test's own, brought up by the commands of docs/many-machines.md."""

from __future__ import annotations

import json
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.nodes.hosts import Host, Network
from tests.tenants.postgres import Server, folder_of_programs

REPOSITORY = Path(__file__).parents[2]
PORT, GCS_PORT, REDIS_PORT = 8000, 6379, 6380
HEAD, WORKERS = "head", ("worker-1", "worker-2")
WAIT_S = 300.0
ENDED = ("timeout", "--kill-after=5", "120")
"""What a test waits for, each command."""
SHELL = ("bash", "-c", 'cd && eval "$(serve_app env)" && exec "$@"', "shell")


class Service:
    """A head that runs no replica, two workers with a model and a router each, a proxy on all three."""

    def __init__(self, folder: Path) -> None:
        self.network = Network(folder)
        programs = folder_of_programs()
        assert programs is not None, "PostgreSQL is not installed"
        self._postgres = Server(programs, self.network.address)
        self.store = self._postgres.new_database()
        self._pepper, self._redis_password = secrets.token_hex(32), secrets.token_hex(16)
        self._redis = self._start_redis(folder)

    def start(self) -> None:
        for name in (HEAD, *WORKERS):
            self.begin(name)
        self.admin: str = self.command("keys", "create", "--admin")["key"]
        self.command("tenants", "add", "acme", "--publishes", "demo:*")
        self.key: str = self.command("keys", "create", "acme", "--scopes", "infer", "adapters:write")["key"]
        self.shell(self.head, "serve", "deploy", "cluster.yaml")

    def _start_redis(self, folder: Path) -> subprocess.Popen[bytes]:
        words = ["--bind", self.network.address, "--port", str(REDIS_PORT), "--requirepass", self._redis_password]
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "redis-server", *words, "--save", "", "--dir", str(folder)],
            stdout=subprocess.DEVNULL,
        )

    def end(self) -> None:
        self._redis.terminate()
        self._redis.wait()
        self.network.end()
        self._postgres.end()

    @property
    def head(self) -> Host:
        return self.network.hosts[HEAD]

    def begin(self, name: str) -> Host:
        """Switch a host on and start Ray there, as whoever starts with the machine would."""
        host = self.network.begin(name)
        (host.home / "cluster.yaml").write_text(yaml.safe_dump(self.content), encoding="utf-8")
        if name == HEAD:
            host.run("ray", "get-auth-token", "--generate")
            theirs = {"RAY_REDIS_ADDRESS": f"{self.network.address}:{REDIS_PORT}"}
            words = ("--head", f"--port={GCS_PORT}", "--num-cpus=0", f"--redis-password={self._redis_password}")
            self.ray(host, *words, environment=theirs)
        else:
            token = host.home / ".ray" / "auth_token"
            token.parent.mkdir(mode=0o700, exist_ok=True)
            token.write_text((self.head.home / ".ray" / "auth_token").read_text())
            token.chmod(0o600)
            self.ray(host, f"--address={self.head.address}:{GCS_PORT}", "--num-cpus=2")
        return host

    def ray(self, host: Host, *words: str, environment: dict[str, str] | None = None) -> None:
        usual = (f"--node-ip-address={host.address}", "--object-store-memory=80000000", "--disable-usage-stats")
        self.shell(host, "ray", "start", *usual, *words, environment=environment)

    def shell(self, host: Host, *words: str, environment: dict[str, str] | None = None) -> str:
        """What a command says in a shell that has the environment of `serve_app env`."""
        return host.run(*ENDED, *SHELL, *words, environment={"SERVE_APP_PEPPER": self._pepper, **(environment or {})})

    def stay(self, host: Host, *words: str, said: Path) -> subprocess.Popen[bytes]:
        """A command that goes on in such a shell, and says things to a file."""
        environment = host.environment | {"SERVE_APP_PEPPER": self._pepper}
        with said.open("wb") as output:
            return subprocess.Popen(host.command(*SHELL, *words), env=environment, stdout=output, stderr=output)

    def command(self, *words: str) -> dict[str, Any]:
        """What a command of ours answers on the head."""
        answer: dict[str, Any] = json.loads(self.shell(self.head, "serve_app", *words, "--json"))
        return answer

    @property
    def content(self) -> dict[str, Any]:
        """The cluster file of this repository, on every host: keys, PostgreSQL, one replica of each kind per host."""
        content: dict[str, Any] = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text(encoding="utf-8"))
        content["proxy_location"] = "EveryNode"
        content["http_options"] |= {"host": "0.0.0.0", "port": PORT}  # of hosts that nobody else reaches
        router, model = content["applications"]
        router["args"]["store"] = self.store
        router["deployments"][0]["user_config"] |= {
            "auth": "keys",
            "adapter_roots": [str(REPOSITORY / "adapters" / "demo")],
        }
        model["args"] |= {"adapters": str(REPOSITORY / "adapters" / "demo")}
        for application in content["applications"]:
            application["deployments"][0] |= {"num_replicas": 2, "max_replicas_per_node": 1}
        return content

    def urls(self, *names: str) -> list[str]:
        """Of the proxies of these hosts, or of all."""
        return [f"http://{self.network.hosts[name].address}:{PORT}" for name in names or self.network.hosts]

    def is_full(self) -> bool:
        """Whether Serve has every replica that it wants, and every host's proxy says that it serves."""
        try:
            said = yaml.safe_load(self.shell(self.head, "serve", "status"))
        except AssertionError:  # the head is not there yet
            return False
        applications = said["applications"].values()
        states = [each["replica_states"] for app in applications for each in app["deployments"].values()]
        is_running = all(each["status"] == "RUNNING" for each in applications)
        return is_running and sum(each.get("RUNNING", 0) for each in states) == 5 and all(map(is_ready, self.urls()))

    def replicas(self, host: Host) -> int:
        """How many of the model and of the router run on the host."""
        told = [" ".join(each.info["cmdline"] or ()) for each in host.processes()]
        return sum(each.startswith("ray::ServeReplica:") and "Accounts" not in each for each in told)

    def drain(self, name: str) -> None:
        """Have Ray take nothing new there, and Serve move what is there elsewhere."""
        why = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "exchanged")
        self.shell(self.network.hosts[name], "ray", "drain-node", *why, "--deadline-remaining-seconds", "600")

    def until(self, holds: Callable[[], object], what: str) -> float:
        """Seconds until it holds."""
        began = time.monotonic()
        while not holds():
            assert time.monotonic() - began < WAIT_S, f"not {what} in {WAIT_S:.0f} s"
            time.sleep(0.5)
        return time.monotonic() - began


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=30).status_code == 200
    except httpx.HTTPError:
        return False
