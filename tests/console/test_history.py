"""Earlier requests: they outlive their tab where somebody wants that, and are for one key alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.console.conftest import PATIENCE_MS, NewPage
from tests.console.served import Served, reciting
from tests.console.test_access import sign_in
from tests.fakes import FakeBackend
from tests.flow.house import House

pytestmark = pytest.mark.slow
PAST = "#past-list button"


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served(reciting(FakeBackend(script=lambda request, sample: ["a ``` b"])))
    yield made
    made.close()


def another_tab(page: Page) -> Page:
    """Of the same browser: what is kept in a tab is not there."""
    tab = page.context.new_page()
    tab.set_default_timeout(PATIENCE_MS)
    tab.goto(page.url)
    return tab


def complete(page: Page) -> None:
    expect(page.locator("#chips input").first).to_be_visible()
    page.get_by_role("button", name="Complete").click()
    expect(page.locator("#summary")).to_contain_text("written, in")


def test_they_are_there_in_a_new_tab_unless_they_are_to_stay_in_theirs(served: Served, new_page: NewPage) -> None:
    page = new_page(served.url)
    complete(page)
    tab = another_tab(page)
    expect(tab.locator(PAST)).to_have_count(1)
    tab.get_by_text("Earlier requests").click()
    tab.locator(PAST).click()
    expect(tab.locator(".answer .text")).to_have_text("a ``` b")
    tab.get_by_label("Keep them in this browser").uncheck()
    expect(tab.locator(PAST)).to_have_count(1)
    third = another_tab(page)
    expect(third.locator("#chips input")).to_have_count(1)
    expect(third.locator("#past")).to_be_hidden()
    assert not third.get_by_label("Keep them in this browser").is_checked()


def test_one_key_does_not_see_those_of_another_and_signing_out_forgets_them(
    guarded: Served, house: House, new_page: NewPage
) -> None:
    keys = [house.key(name)["authorization"].removeprefix("Bearer ") for name in ("acme", "rivals")]
    page = new_page(guarded.url)
    sign_in(page, keys[0])
    complete(page)
    for key, number in ((keys[1], 0), (keys[0], 1)):
        tab = another_tab(page)
        sign_in(tab, key)
        expect(tab.locator("#chips input")).to_have_count(2)
        expect(tab.locator(PAST)).to_have_count(number)
    assert page.evaluate("localStorage.length") == 1
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator("#key")).to_be_visible()
    assert page.evaluate("localStorage.length") == 0
