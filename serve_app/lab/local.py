"""Finds a service for a notebook: one that answers already, or one that is started here and ended again.

With keys or without: a notebook about tenants needs an administrator's key, one about anything else needs none.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from serve_app.cli.client import Service, ServiceFailed
from serve_app.cli.screen import DEFAULT_URL, URL_VARIABLE
from serve_app.lab.client import NO_KEY, key_of_environment

FILE = "cluster.yaml"
READY_TIMEOUT_S = 480.0
END_TIMEOUT_S = 90.0
POLL_S = 0.5
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """A service, and what was started for it.

    key:     an administrator's, where one was looked for; no output of a cell shows it
    process: `serve_app up`; None where the service was there already and is somebody else's to end
    log:     what that says
    """

    url: str
    key: str | None = field(default=None, repr=False)
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


def find_or_start(*, args: Mapping[str, Any] | None = None) -> Local:
    """Return the service that `SERVE_APP_URL` names, or the one on port 8000, or a new one as `start` takes `args`.

    A service that runs keeps its own `args`.
    """
    url = _named_url()
    return Local(url=url) if is_ready(url) else start(args=args)


def find_or_start_with_keys(
    *,
    args: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Local:
    """Return a service that asks for keys, with an administrator's key.

    If the key of the environment is an administrator's, that is the service above. Otherwise a new one starts, with a
    store of its own and these changes, as `start` takes them.
    """
    url, key = _named_url(), key_of_environment()
    if key != NO_KEY and is_administered_by(key, url):
        return Local(url=url, key=key)
    return start(args=args, model=model, router=_new_store(), settings={"auth": "keys", **(settings or {})})


def start(
    *,
    args: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    router: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Local:
    """Start the cluster file's service on a free port, with these changes, and wait for it; it ends with the notebook.

    args:     other `args` of the model, such as `adapters`
    model:    other keys of its deployment, such as `num_replicas`
    router:   other `args` of the router, such as `store`; with that, `Local.key` is a new administrator's key
    settings: other keys of the router's `user_config`, such as `auth`
    Raises RuntimeError with the end of the log where it does not come up.
    """
    file = cluster_file()
    content = changed(
        yaml.safe_load(file.read_text(encoding="utf-8")), args=args, model=model, router=router, settings=settings
    )
    content["http_options"]["port"] = _free_port()
    local = _launch(content, file.parent)
    atexit.register(local.end)
    try:
        _wait(local)
    except BaseException:
        local.end()
        raise
    return local


def changed(
    content: Mapping[str, Any],
    *,
    args: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    router: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of a cluster file with the changes that `start` takes, beside the file's own keys."""
    made = copy.deepcopy(dict(content))
    for application in made["applications"]:
        has, deployment = application.get("args") or {}, application["deployments"][0]
        if "path" in has:
            application["args"] = {**has, **(args or {})}
            deployment |= model or {}
        else:
            application["args"] = {**has, **(router or {})}
            deployment["user_config"] = {**(deployment.get("user_config") or {}), **(settings or {})}
    return made


def cluster_file() -> Path:
    """Return the nearest one from here upwards. Raises FileNotFoundError."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / FILE).is_file():
            return folder / FILE
    raise FileNotFoundError(f"There is no {FILE} here or above: start the notebook within the repository.")


def is_ready(url: str) -> bool:
    """Return whether a service answers there and every model of it has a replica."""
    return _answers(Service(url=url, timeout_s=ANSWER_S), "/health", member="status")


def is_administered_by(key: str, url: str) -> bool:
    """Return whether a service that is ready answers this key what it answers administrators alone."""
    return _answers(Service(url=url, key=key, timeout_s=ANSWER_S), "/admin/tenants", member="data") and is_ready(url)


def administrators_key(file: Path, folder: Path) -> str:
    """Return a new one, made by the command line in the store that the file names."""
    words = [sys.executable, "-m", "serve_app", "keys", "create", "--admin", "--file", str(file), "--json"]
    done = subprocess.run(words, cwd=folder, capture_output=True, check=False, text=True)
    if done.returncode:
        raise RuntimeError(f"`serve_app keys create` failed:\n{done.stderr[-2000:]}")
    return str(json.loads(done.stdout)["key"])


def _named_url() -> str:
    return (os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")


def _new_store() -> dict[str, str]:
    """Return the router's `args` for tenants and keys in a folder of their own."""
    place = Path(tempfile.mkdtemp(prefix="lab-"))
    return {"store": f"sqlite:///{place / 'kept.db'}", "pepper": str(place / "pepper")}


def _answers(service: Service, path: str, *, member: str) -> bool:
    try:
        service.json(path, member=member)
    except ServiceFailed:
        return False
    return True


def _launch(content: Mapping[str, Any], folder: Path) -> Local:
    place = Path(tempfile.mkdtemp(prefix="lab-"))
    file, log = place / FILE, place / "log.txt"
    file.write_text(yaml.safe_dump(dict(content)), encoding="utf-8")
    has_store = any("store" in (each.get("args") or {}) for each in content["applications"])
    key = administrators_key(file, folder) if has_store else None
    with log.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "serve_app", "up", str(file)], cwd=folder, stdout=written, stderr=written
        )
    return Local(url=f"http://127.0.0.1:{content['http_options']['port']}", key=key, process=process, log=log)


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
