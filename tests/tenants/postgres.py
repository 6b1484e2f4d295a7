"""A PostgreSQL server of the tests' own, with a folder, a user and a password that nothing else has."""

from __future__ import annotations

import getpass
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.engine import URL, make_url

from tests.ports import held_port

ROLE = "serve_app"
SERVICE_USER = "postgres"
"""Whom Debian's package makes: the server refuses to run as root."""
WAIT_S = 60


def folder_of_programs() -> Path | None:
    """Where the server's programs are; None where there is no server."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    return next((each.parent for each in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None)


class Server:
    """A running one. It is ended by its process, and its folder removed.  host: the address that it listens on"""

    def __init__(self, programs: Path, host: str = "127.0.0.1") -> None:
        self._programs, self._host = programs, host
        self._user = SERVICE_USER if os.getuid() == 0 else getpass.getuser()
        self._folder = Path(tempfile.mkdtemp(prefix="serve_app-postgres-"))
        self._password = secrets.token_hex(16)
        self._numbers = count()
        self._initialise()
        self._holding = held_port()
        self.port = self._holding.__enter__()
        self._process = self._start()

    def new_database(self) -> str:
        """The address of an empty one."""
        name = f"store_{next(self._numbers)}"
        engine = create_engine(self._url("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE template0")
        engine.dispose()
        return self._url(name).render_as_string(hide_password=False)

    def drop_connections(self, url: str) -> None:
        """As a server does that is started anew."""
        engine = create_engine(self._url("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            name = make_url(url).database
            ends = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
            connection.exec_driver_sql(ends)
        engine.dispose()

    def begin_anew(self, pause_s: float) -> None:
        """Break off everything, as by `pg_ctl stop -m immediate`, and recover after a while on the same port."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(WAIT_S)
        time.sleep(pause_s)
        self._process = self._start()

    def end(self) -> None:
        self._process.send_signal(signal.SIGINT)  # which ends its connections, too
        self._process.wait(WAIT_S)
        self._holding.__exit__(None, None, None)
        shutil.rmtree(self._folder)

    def _url(self, database: str) -> URL:
        return URL.create(
            "postgresql+psycopg", ROLE, self._password, host=self._host, port=self.port, database=database
        )

    def _initialise(self) -> None:
        secret = self._folder / "password"
        secret.write_text(self._password, encoding="ascii")
        if os.getuid() == 0:
            owner = pwd.getpwnam(self._user)
            for each in (self._folder, secret):
                os.chown(each, owner.pw_uid, owner.pw_gid)
        words = ["--pgdata", self._data, "--username", ROLE, "--pwfile", str(secret), "--auth", "scram-sha-256"]
        order = [
            "--locale-provider",
            "icu",
            "--icu-locale",
            "en",
        ]  # of letters as people have it, where `~` is before 0
        self._run("initdb", *words, *order, "--encoding", "UTF8", "--locale", "C", "--no-sync")
        with Path(self._data, "pg_hba.conf").open("a", encoding="ascii") as rules:
            rules.write("host all all samenet scram-sha-256\n")

    def _start(self) -> subprocess.Popen[bytes]:
        settings = {"listen_addresses": self._host, "port": self.port, "fsync": "off", "unix_socket_directories": ""}
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        command = [str(self._programs / "postgres"), "-D", self._data, *words]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **self._as_user())
        try:
            self._wait_for(process)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return process

    def _wait_for(self, process: subprocess.Popen[bytes]) -> None:
        for _ in range(WAIT_S * 10):
            ready = subprocess.run(
                [str(self._programs / "pg_isready"), "-q", "-h", self._host, "-p", str(self.port), "-t", "1"],
                check=False,
            )
            if ready.returncode == 0:
                return
            assert process.poll() is None, "the server ended while it started"
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        raise TimeoutError("the server does not answer")

    @property
    def _data(self) -> str:
        return str(self._folder / "data")

    def _run(self, program: str, *words: str) -> None:
        subprocess.run([str(self._programs / program), *words], check=True, capture_output=True, **self._as_user())

    def _as_user(self) -> dict[str, Any]:
        if os.getuid():
            return {"cwd": self._folder}
        owner: Sequence[int] = pwd.getpwnam(self._user)[2:4]
        return {"user": owner[0], "group": owner[1], "extra_groups": [], "cwd": self._folder}
