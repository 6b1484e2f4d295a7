"""GET /: a browser is shown to the console, a program where everything is, and neither anything of the service."""

from __future__ import annotations

import httpx
import pytest

from serve_app.api.paths import Path
from serve_app.core.errors import Unauthenticated
from serve_app.core.tenants import Identity
from serve_app.http.app import build_app
from serve_app.http.guard import OPEN_DOOR, Door
from serve_app.http.pages import PAGE, static_files
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


def refuse(key: str | None) -> Identity:
    raise Unauthenticated("no key opens this")


def asking(*, door: Door = OPEN_DOOR, mounted_at: str = "", fleet: Fleet | None = None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(Router(fleet or Fleet("router-0")), door=door), root_path=mounted_at)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.mark.parametrize("door", [OPEN_DOOR, Door(identify=refuse)], ids=["open", "keys"])
@pytest.mark.parametrize(
    ("mounted_at", "address", "console"),
    [
        ("", "/", "/console"),
        ("", "//", "/console"),
        ("/llm", "/llm", "/llm/console"),
        ("/llm", "/llm/", "/llm/console"),
        ("/a/llm", "/a/llm", "/a/llm/console"),
    ],
)
async def test_a_browser_that_has_the_address_alone_comes_to_the_console(
    door: Door, mounted_at: str, address: str, console: str
) -> None:
    async with asking(door=door, mounted_at=mounted_at) as client:
        sent_on = await client.get(f"http://test{address}", headers=BROWSER)
        assert (sent_on.status_code, sent_on.headers["vary"]) == (302, "accept")
        assert "://" not in sent_on.headers["location"], "a proxy in front knows the address, we do not"
        page = await client.get(f"http://test{address}", headers=BROWSER, follow_redirects=True)
        assert (page.url.path, page.content) == (console, static_files()[PAGE].content)


@pytest.mark.parametrize("accept", ["*/*", "application/json", ""])
async def test_a_program_is_told_where_everything_is_and_nothing_of_the_service(accept: str) -> None:
    fleet, backend = Fleet("router-1"), FakeBackend()
    fleet.put(backend.card, backend)
    answers = []
    for client in (asking(door=Door(identify=refuse)), asking(fleet=fleet)):
        async with client:
            answers.append(await client.get("/", headers={"accept": accept}))
            assert (await client.head("/")).status_code == 200
            assert (await client.post("/")).status_code == 405
    assert answers[0].content == answers[1].content, "the same for everybody"
    assert (answers[0].status_code, answers[0].headers["content-type"]) == (200, "application/json")
    assert set(answers[0].json()["paths"].values()) <= {path.value for path in Path}
    assert {Path.CONSOLE, Path.DOCS, Path.COMPLETIONS} <= set(answers[0].json()["paths"].values())
    await fleet.close()
