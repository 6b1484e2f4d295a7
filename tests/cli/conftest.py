"""One service for all commands of a module, and a command line that asks it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.served import CommandLine, Served, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


@pytest.fixture
def run(served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(served.url, monkeypatch, capsys)
