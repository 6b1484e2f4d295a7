"""A browser, where the machine has one, and pages of it that forgive nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.console.served import Served, engine, reciting
from tests.fakes import FakeBackend, model_card, replica_card
from tests.flow.house import House

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ANSWERED = "Failed to load resource: the server responded with a status of"
UNANSWERED = "Failed to load resource: net::ERR_"
NewPage = Callable[..., Page]
PATIENCE_MS = 60_000
"""How long a page may take to show what it is to show: long, as other work may hold the machine."""


def chromium() -> str:
    """Where one is; a test skips where there is none."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no chromium on this machine: install the package `chromium`, or name one in CHROMIUM")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture
def new_page(browser: Browser) -> Iterator[NewPage]:
    """Pages whose scripts raise nothing and ask for nothing that the policy forbids."""
    contexts, faults = [], []

    def opened(url: str, **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: faults.append(line.text) if line.type in ("error", "warning") else None)
        page.goto(f"{url}/console")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [fault for fault in faults if not fault.startswith((ANSWERED, UNANSWERED))] == []


def look_while_loading(page: Page) -> None:
    """Let the page find three times that a model loads, so that it has shown twice what is served."""
    page.route("**/health", lambda route: route.fulfill(status=503, json={"status": "loading", "models": ["coming"]}))
    for _ in range(4):
        with page.expect_response("**/health"):
            pass


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    """The embedded model with three adapters."""
    served = Served(engine)
    yield served
    served.close()


@pytest.fixture
def backend() -> FakeBackend:
    """Recites a word where it is told to, and markup first."""
    words = ["<b>bold</b>", "<script>document.title = 'taken'</script>", "<img src=x onerror=alert(1)>"]
    card = replica_card("r0", model_card("tiny"))
    return FakeBackend(card, script=lambda request, sample: words + [" word"] * 40, is_stepped=True)


@pytest.fixture
def tiny(backend: FakeBackend) -> Iterator[Served]:
    served = Served(reciting(backend))
    yield served
    served.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.store.close()


@pytest.fixture
def guarded(house: House) -> Iterator[Served]:
    """A service that asks for keys."""
    served = Served(house.kept_open)
    yield served
    served.close()
