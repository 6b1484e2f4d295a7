"""Adapters published in the console: their versions, the way back, and what a key may not do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.sync_api import expect
from starlette.types import ASGIApp

from serve_app.http.app import build_app
from serve_app.router.fleet import Fleet
from serve_app.router.publishing import Publishing
from serve_app.router.router import Router
from tests.console.conftest import NewPage
from tests.console.served import Served
from tests.console.test_access import sign_in
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card
from tests.flow.house import House
from tests.flow.test_publishing import adapter_at

pytestmark = pytest.mark.slow


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    @asynccontextmanager
    async def built() -> AsyncIterator[ASGIApp]:
        fleet = Fleet("router-0")
        card = replica_card("r0", model_card("tiny", adapter_card("sql")))
        fleet.put(card, FakeBackend(card))
        yield build_app(Router(fleet), publishing=Publishing(fleet, roots=[str(tmp_path)]))
        await fleet.close()

    made = Served(built)
    yield made
    made.close()


def test_an_adapter_is_published_replaced_rolled_back_and_withdrawn(
    served: Served, new_page: NewPage, tmp_path: Path
) -> None:
    page = new_page(served.url)
    page.get_by_role("link", name="Models", exact=True).click()
    rows = page.locator("#adapter-list tbody tr")
    expect(rows).to_have_count(1)
    page.get_by_label("Published as").fill("tiny:law")
    page.get_by_label("Folder").fill(adapter_at(tmp_path, "law"))
    page.get_by_role("button", name="Publish").click()
    expect(rows).to_have_count(2)
    law = rows.filter(has_text="tiny:law")
    expect(law).to_contain_text("by operator")
    expect(page.locator("#model-list")).to_contain_text("tiny:law")
    first = law.locator("td code").first.inner_text()
    page.get_by_label("Published as").fill("tiny:law")
    page.get_by_label("Folder").fill(adapter_at(tmp_path, "law-2", b"v2"))
    page.get_by_role("button", name="Publish").click()
    expect(page.locator("#publish")).to_contain_text("has already been loaded")
    page.get_by_label("Replace what is served").check()
    page.get_by_role("button", name="Publish").click()
    expect(law.locator("td code").nth(1)).to_have_text(first)
    for _ in range(2):
        page.get_by_role("button", name="Roll back tiny:law").click()
    expect(law.locator("td code").first).to_have_text(first)
    for _ in range(2):
        page.get_by_role("button", name="Withdraw tiny:law").click()
    expect(rows).to_have_count(1)
    expect(page.locator("#model-list")).not_to_contain_text("tiny:law")


def test_a_canary_is_shown_with_its_share_and_ended(served: Served, new_page: NewPage, tmp_path: Path) -> None:
    page = new_page(served.url)
    page.get_by_role("link", name="Models", exact=True).click()
    law = page.locator("#adapter-list tbody tr").filter(has_text="tiny:law")
    for folder, weights, canary in (("law", b"v1", ""), ("law-2", b"v2", "5%")):
        page.get_by_label("Published as").fill("tiny:law")
        page.get_by_label("Folder").fill(adapter_at(tmp_path, folder, weights))
        page.get_by_label("Canary").fill(canary)
        page.get_by_role("button", name="Publish").click()
        expect(law).to_contain_text("5 % of requests. 0 of 0 failed" if canary else "by operator")
    for _ in range(2):
        page.get_by_role("button", name="Roll back tiny:law").click()
    expect(law).not_to_contain_text("of requests")


def test_a_key_that_may_not_publish_sees_the_models_alone(guarded: Served, house: House, new_page: NewPage) -> None:
    page = new_page(guarded.url)
    sign_in(page, house.key("acme")["authorization"].removeprefix("Bearer "))
    page.get_by_role("link", name="Models", exact=True).click()
    expect(page.locator("#model-list")).to_contain_text("tiny:sql")
    expect(page.get_by_role("heading", name="Versions")).to_be_hidden()
