"""Finds a service for a notebook: one that answers already, or one that is started here and ended again."""

from __future__ import annotations

import atexit
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve_app.lab.client import DEFAULT_URL, URL_VARIABLE

FILE = "cluster.yaml"
READY_TIMEOUT_S = 480.0
END_TIMEOUT_S = 90.0
POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """A service, and what was started for it.

    process: `serve_app up`; None where the service was there already and is somebody else's to end
    log:     what that says
    """

    url: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def end(self) -> None:
        """End what was started, and nothing else; once is enough."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its guard ends the rest of the cluster
            self.process.wait()


def find_or_start() -> Local:
    """The service that `SERVE_APP_URL` names, or the one on port 8000, or a new one."""
    url = os.environ.get(URL_VARIABLE) or DEFAULT_URL
    return Local(url=url.rstrip("/")) if is_ready(url) else start()


def start(*, adapters: Path | None = None, model: Mapping[str, Any] | None = None) -> Local:
    """Start the cluster file's service on a free port, with these changes, and wait for it; it ends with the notebook.

    adapters: the folder of the model's adapters, in the place of the file's
    model:    other keys of its deployment, such as `num_replicas`
    Raises RuntimeError with the end of the log where it does not come up.
    """
    file = cluster_file()
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    content["http_options"]["port"] = _free_port()
    for application in content["applications"]:
        if "path" in (application.get("args") or {}):
            application["args"] |= {} if adapters is None else {"adapters": str(adapters)}
            application["deployments"][0] |= model or {}
    local = _launch(content, file.parent)
    atexit.register(local.end)
    try:
        _wait(local)
    except BaseException:
        local.end()
        raise
    return local


def cluster_file() -> Path:
    """The nearest one from here upwards. Raises FileNotFoundError."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / FILE).is_file():
            return folder / FILE
    raise FileNotFoundError(f"There is no {FILE} here or above: start the notebook within the repository.")


def is_ready(url: str) -> bool:
    """Whether a service answers there and every model of it has a replica."""
    try:
        with _opener_of(url).open(f"{url.rstrip('/')}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _opener_of(url: str) -> urllib.request.OpenerDirector:
    """A proxy of the environment is for other machines, and never for this one."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        is_here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = False
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))


def _launch(content: Mapping[str, Any], folder: Path) -> Local:
    place = Path(tempfile.mkdtemp(prefix="lab-"))
    file, log = place / FILE, place / "log.txt"
    file.write_text(yaml.safe_dump(dict(content)), encoding="utf-8")
    with log.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "serve_app", "up", str(file)], cwd=folder, stdout=written, stderr=written
        )
    return Local(url=f"http://127.0.0.1:{content['http_options']['port']}", process=process, log=log)


def _wait(local: Local) -> None:
    assert local.process is not None
    assert local.log is not None
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not is_ready(local.url):
        if local.process.poll() is not None or time.monotonic() > deadline:
            said = local.log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RuntimeError(f"`serve_app up` did not become ready:\n{said}")
        time.sleep(POLL_S)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
