"""Earlier requests: they outlive their tab where somebody wants that, and are for one key alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.console.conftest import PATIENCE_MS, NewPage
from tests.console.served import Served, reciting
from tests.console.test_access import sign_in
from tests.fakes import FakeBackend
from tests.flow.house import House

pytestmark = pytest.mark.slow
PAST = "#past-list button"
DRAFT = "sessionStorage['serve_app.draft']"
FILLED = """() => {
  const [one] = JSON.parse(localStorage.getItem("serve_app.past"));
  const large = { ...one, draft: { ...one.draft, prompt: "x".repeat(100_000) } };
  localStorage.setItem("serve_app.past", JSON.stringify(Array(50).fill(large)));
}"""


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


def earlier(page: Page) -> Locator:
    """The list, unfolded where there is one."""
    expect(page.locator("#chips input").first).to_be_visible()
    page.locator("#past").evaluate("(details) => { details.open = true; }")
    return page.locator(PAST)


def complete(page: Page) -> None:
    expect(page.locator("#chips input").first).to_be_visible()
    page.get_by_role("button", name="Complete").click()
    expect(page.locator("#summary")).to_contain_text("written, in")


def test_they_are_there_in_a_new_tab_unless_they_are_to_stay_in_theirs(served: Served, new_page: NewPage) -> None:
    page = new_page(served.url)
    complete(page)
    tab = another_tab(page)
    expect(earlier(tab)).to_have_count(1)
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
        expect(earlier(tab)).to_have_count(number)
    assert page.evaluate("localStorage.length") == 1
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator("#key")).to_be_visible()
    assert page.evaluate("localStorage.length") == 0


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator("#message")).to_have_value("")
    expect(page.locator("#summary")).to_contain_text("written, in")


def test_a_chat_is_one_of_them_and_goes_on_from_where_it_was(served: Served, new_page: NewPage) -> None:
    page = new_page(served.url)
    expect(page.locator("#chips input")).to_have_count(1)
    page.get_by_text("Chat", exact=True).click()
    page.get_by_label("System message").fill("Be\nbrief.")
    for text in ("first", "second"):
        say(page, text)
    page.get_by_role("button", name="Start over").click()
    say(page, "another chat")
    expect(earlier(page)).to_have_count(2)
    page.locator(PAST).last.click()
    expect(page.locator("#summary")).to_contain_text("goes on from here")
    assert [turn.split("\n")[-1] for turn in page.locator(".turn").all_inner_texts()] == [
        "brief.", "first", "a ``` b", "second"
    ]  # fmt: skip
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "third")
    body: Any = asked.value.post_data_json
    told = [(each["role"], each["content"]) for each in body["messages"]]
    assert told[0] == ("system", "Be\nbrief.")
    assert [text for role, text in told if role == "user"] == ["first", "second", "third"]
    expect(page.locator(PAST)).to_have_count(2)
    page.get_by_label("Find", exact=True).fill("THIRD")
    expect(page.locator(PAST)).to_have_count(1)
    expect(page.locator("#past-found")).to_have_text("1 of 2")


def test_a_chat_of_which_two_tabs_go_on_is_kept_as_both_went_on(served: Served, new_page: NewPage) -> None:
    page = new_page(served.url)
    expect(page.locator("#chips input")).to_have_count(1)
    page.get_by_text("Chat", exact=True).click()
    say(page, "first")
    tab = another_tab(page)
    tab.evaluate("(draft) => sessionStorage.setItem('serve_app.draft', draft)", page.evaluate(DRAFT))
    tab.reload()
    expect(tab.locator("#chips input")).to_have_count(1)
    for where, text in ((page, "here"), (tab, "there"), (page, "here too")):
        say(where, text)
    expect(earlier(tab)).to_have_count(2)
    tab.get_by_label("Find", exact=True).fill("first")
    expect(tab.locator("#past-found")).to_have_text("2 of 2")
    tab.get_by_label("Find", exact=True).fill("there")
    expect(tab.locator("#past-found")).to_have_text("1 of 2")


def test_they_are_forgotten_at_the_second_press_alone(served: Served, new_page: NewPage) -> None:
    page = new_page(served.url)
    complete(page)
    expect(earlier(page)).to_have_count(1)
    forget = page.get_by_role("button", name="Forget earlier requests")
    forget.click()
    expect(forget).to_contain_text("press again")
    expect(page.locator(PAST)).to_have_count(1)
    forget.click()
    expect(page.locator("#past")).to_be_hidden()


def test_a_browser_without_room_keeps_the_newest(served: Served, new_page: NewPage) -> None:
    page = new_page(served.url)
    complete(page)
    page.evaluate(FILLED)
    complete(page)
    expect(earlier(page).first).to_contain_text("Once upon a time")
    kept = page.locator(PAST).count()
    assert 30 < kept < 60, "as many as there is room for"
