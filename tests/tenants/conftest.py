"""Databases that stores are tried on: SQLite, and PostgreSQL where there is a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tenants.postgres import Server, folder_of_programs

BOTH = ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)]


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    programs = folder_of_programs()
    if programs is None:
        pytest.skip("there is no PostgreSQL here; Debian has it as the package `postgresql`")
    pytest.importorskip("psycopg")
    server = Server(programs)
    yield server
    server.end()


@pytest.fixture(params=BOTH)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'tenants.db'}"
    server: Server = request.getfixturevalue("postgresql")
    return server.new_database()
