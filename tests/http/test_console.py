"""The console's files: few, small, the service's own, and nothing of the service in them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest

from serve_app.core.errors import Unauthenticated
from serve_app.core.tenants import Identity
from serve_app.http.app import build_app
from serve_app.http.guard import Door
from serve_app.http.pages import PAGE, static_files
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend

FILES = static_files()
TEXTS = {name: file.content.decode() for name, file in FILES.items()}
SCRIPTS = sorted(name for name in FILES if name.endswith(".js"))
MAX_LINES = 300
MAX_BYTES = 146_000
"""Of the console with the description of the API, which was a page of 6,209 bytes beside 140,000."""


def refuse(key: str | None) -> Identity:
    raise Unauthenticated("no key opens this")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(Router(Fleet("router-0")), door=Door(identify=refuse)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.law("The door")
async def test_without_a_key_there_are_its_files_and_nothing_else(client: httpx.AsyncClient) -> None:
    fleet = Fleet("router-1")
    backend = FakeBackend()
    fleet.put(backend.card, backend)
    for name in FILES:
        address = "/console" if name == PAGE else f"/console/{name}"
        answered = await client.get(address)
        assert (answered.status_code, answered.content) == (200, FILES[name].content), "the same for everybody"
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(build_app(Router(fleet))), base_url="http://test"
        ) as other:
            assert (await other.get(address)).content == answered.content
    for address in ("/live", "/openapi.json", "/v1/models", "/console/../metrics", "/console/none/x.js"):
        assert (await client.get(address)).status_code == 401
    await fleet.close()


async def test_what_is_no_file_of_it_is_a_404_in_json(client: httpx.AsyncClient) -> None:
    for address in ("/console/nothing.js", "/console/index.css"):
        answered = await client.get(address)
        assert (answered.status_code, answered.json()["error"]["error_code"]) == (404, "not_found")


async def test_the_policy_allows_the_services_own_files_alone(client: httpx.AsyncClient) -> None:
    for address in ("/console", "/console/main.js", "/console/base.css", "/console/icon.svg"):
        headers = (await client.get(address)).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert set(re.findall(r"'[a-z-]+'", policy)) == {"'none'", "'self'", "'script'"}
        assert "require-trusted-types-for 'script'" in policy
        assert "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"


async def test_a_browser_that_has_a_file_is_not_sent_it_again(client: httpx.AsyncClient) -> None:
    first = await client.get("/console/main.js")
    again = await client.get("/console/main.js", headers={"if-none-match": f"W/{first.headers['etag']}"})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]


async def test_a_slash_behind_it_leads_to_it(client: httpx.AsyncClient) -> None:
    """What the page links to is relative, so that it works below any prefix."""
    answered = await client.get("/console/")
    assert (answered.status_code, answered.headers["location"]) == (308, "../console")
    assert (await client.get("/console/", follow_redirects=True)).text == TEXTS[PAGE]


def test_every_file_is_short_and_all_of_them_are_small() -> None:
    assert {name for name, text in TEXTS.items() if len(text.splitlines()) > MAX_LINES} == set()
    assert sum(len(file.content) for file in FILES.values()) <= MAX_BYTES


def test_every_file_is_led_to_and_everything_that_is_led_to_is_there() -> None:
    linked = set(re.findall(r'(?:href|src)="console/([^"]+)"', TEXTS[PAGE]))
    imported = {name for text in TEXTS.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert linked | imported | {PAGE} == set(FILES)


def test_nothing_comes_from_elsewhere_and_nothing_is_inline() -> None:
    for name, text in TEXTS.items():
        elsewhere = [each for each in re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text) if "www.w3.org" not in each]
        assert elsewhere == [], name
    page = TEXTS[PAGE]
    assert (
        re.findall(r"<style|\sstyle=|\son\w+=|javascript:|<script(?! type=\"module\" src=\"[^\"]+\"></script>)", page)
        == []
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_makes_markup_or_code_of_a_text(name: str) -> None:
    found = re.findall(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|createContextualFragment|DOMParser"
        r"|document\.cookie|setHTML|srcdoc",
        TEXTS[name],
    )
    assert found == []


def test_one_script_alone_keeps_anything_when_the_tab_is_closed() -> None:
    assert [name for name in SCRIPTS if "localStorage" in TEXTS[name]] == ["memory.js"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_what_it_does(name: str) -> None:
    first = TEXTS[name].splitlines()[0]
    assert re.fullmatch(r"// [A-Z].{30,}", first)
