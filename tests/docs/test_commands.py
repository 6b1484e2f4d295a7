"""Commands for readers work as they stand: each curl is answered, each Python runs, each module that is run exists."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shlex
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import pytest_asyncio
import uvicorn
import yaml

from serve_app.deployments.arguments import RouterSettings
from tests.docs.sections import REPOSITORY
from tests.docs.test_references import FENCE
from tests.flow.stack import Stack, running_stack

DOCS = REPOSITORY / "docs"
PAGES = [
    REPOSITORY / "README.md",
    DOCS / "getting-started.md",
    *sorted((DOCS / "guides").glob("*.md")),
    *sorted((DOCS / "dialects").glob("*.md")),
]
ADDRESS = "http://127.0.0.1:8000"
pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Curl:
    """A request as a page has it."""

    path: str
    headers: tuple[tuple[str, str], ...]
    body: str | None


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [found["body"] for found in FENCE.finditer(text) if found["language"] == language]


def lines_of(page: Path) -> Iterator[str]:
    """Commands of its shell blocks, those that go on in the next line joined."""
    for block in blocks(page, "sh"):
        whole = ""
        for line in block.splitlines():
            whole += line + "\n"
            if whole.rstrip().endswith("\\") or whole.count("'") % 2:
                continue
            yield whole.strip()
            whole = ""


def curls(page: Path) -> list[Curl]:
    return [curl_of(line) for line in lines_of(page) if line.startswith("curl ")]


def curl_of(line: str) -> Curl:
    """Raises AssertionError for an option that no page needs."""
    words = iter(shlex.split(line.replace("\\\n", " "), comments=True)[1:])
    address, headers, body = "", [], None
    for word in words:
        match word:
            case "-H":
                name, _, value = next(words).partition(":")
                headers.append((name, value.strip()))
            case "-d":
                body = next(words)
            case _:
                assert word.startswith(ADDRESS), f"{word} is no option that the pages use"
                address = word
    parts = urlsplit(address)
    return Curl(path=parts.path or "/", headers=tuple(headers), body=body)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1, threads=1) as stack:
        yield stack


@pytest.mark.asyncio(loop_scope="module")
async def test_every_curl_is_answered(stack: Stack) -> None:
    transport = httpx.ASGITransport(app=stack.app)
    asked = [(page, curl) for page in PAGES for curl in curls(page)]
    assert len(asked) > 12
    async with httpx.AsyncClient(transport=transport, base_url=ADDRESS, timeout=120) as client:
        for page, curl in asked:
            method = "GET" if curl.body is None else "POST"
            answer = await client.request(method, curl.path, headers=dict(curl.headers), content=curl.body)
            assert answer.status_code == 200, f"{page.name}: {curl.body}: {answer.text}"
            assert "x-ignored-parameters" not in answer.headers, f"{page.name}: {curl.body}"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
async def test_its_python_runs_from_top_to_bottom(page: Path, stack: Stack) -> None:
    program = "\n".join(blocks(page, "python"))
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(stack.app, lifespan="off", log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    try:
        await asyncio.to_thread(run, program.replace(ADDRESS, f"http://127.0.0.1:{port}"), page.name)
    finally:
        server.should_exit = True
        await serving


def run(program: str, name: str) -> None:
    names: dict[str, object] = {"__name__": name}
    try:
        exec(compile(program, name, "exec"), names)
    finally:
        client = names.get("client")
        if client is not None:
            client.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_modules_that_are_run_are_there(page: Path) -> None:
    for line in lines_of(page):
        for module in re.findall(r"python3? -m ([\w.]+)", line):
            assert importlib.util.find_spec(module) is not None, module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_that_are_shown_are_taken(page: Path) -> None:
    for block in blocks(page, "yaml"):
        shown = yaml.safe_load(block)
        if "user_config" in shown:
            RouterSettings.model_validate(shown["user_config"])


def test_a_curl_is_read_with_its_headers_and_its_body_over_several_lines() -> None:
    found = curl_of(f"curl {ADDRESS}/v1/x -H 'a: b' \\\n  -d '{{\"k\":\n 1}}'  # more")
    assert (found.path, found.headers, json.loads(found.body or "")) == ("/v1/x", (("a", "b"),), {"k": 1})
    with pytest.raises(AssertionError, match="no option"):
        curl_of(f"curl -k {ADDRESS}")
