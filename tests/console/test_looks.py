"""Everybody can use it: no serious finding of axe, nothing wider than a small telephone, light and dark."""

from __future__ import annotations

import time
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from serve_app.core.ledger import Row
from tests.console.conftest import NewPage, look_while_loading
from tests.console.served import Served
from tests.flow.house import House

pytestmark = pytest.mark.slow
SERIOUS = ("serious", "critical")
SCREENS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 860}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 860}},
    "small": {"color_scheme": "light", "viewport": {"width": 360, "height": 740}, "has_touch": True},
}


def check(page: Page, where: str) -> None:
    found = Axe().run(page).response["violations"]
    serious = [
        (each["id"], node["target"], node["failureSummary"])
        for each in found
        if each["impact"] in SERIOUS
        for node in each["nodes"]
    ]
    assert serious == [], where
    width, room = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert width <= room, f"{where} is {width} px wide"


@pytest.mark.parametrize("screen", SCREENS)
def test_every_section_is_for_everybody(demo: Served, new_page: NewPage, screen: str) -> None:
    page = new_page(demo.url, bypass_csp=True, **SCREENS[screen])
    expect(page.locator("#chips input")).to_have_count(4)
    check(page, "before anything was done")
    for box in page.locator("#chips input").all():
        box.check()
    page.locator("#run").click()
    expect(page.locator("#summary")).to_contain_text("written, in")
    page.get_by_text("This request as curl or Python").click()
    check(page, "answers")
    if not page.get_by_label("temperature", exact=True).is_visible():
        page.get_by_text("Parameters", exact=True).click()
    page.get_by_label("temperature", exact=True).fill("9")
    page.locator("#run").click()
    expect(page.locator("#problem")).to_contain_text("param: temperature")
    check(page, "refused")
    page.get_by_text("Chat", exact=True).click()
    page.locator("#tools summary").click()
    page.get_by_role("button", name="Add a function").click()
    page.get_by_text("Earlier requests").click()
    check(page, "chat")
    for name, sign in (("Models", "#model-list table"), ("Live", "#replicas table"), ("API", "#of-routes a >> nth=0")):
        page.get_by_role("link", name=name, exact=True).click()
        expect(page.locator(sign)).to_be_visible()
        check(page, name)


@pytest.mark.parametrize("screen", SCREENS)
def test_signing_in_and_administering_is_for_everybody(
    guarded: Served, house: House, new_page: NewPage, screen: str
) -> None:
    page = new_page(guarded.url, bypass_csp=True, **SCREENS[screen])
    expect(page.locator("#key")).to_be_visible()
    check(page, "signing in")
    page.locator("#key").fill(house.admin)
    page.get_by_role("button", name="Sign in").click()
    now = time.time()
    row = Row(id="r", tenant="acme", key_id="k", request_id="r", model="tiny", at=now, completion_tokens=5)
    house.admin_service.ledger.record([row], [], now)
    page.get_by_role("link", name="Access").click()
    page.locator("#tenant-name").fill("acme")
    page.get_by_role("button", name="Add a tenant").click()
    expect(page.locator("#tenants")).to_contain_text("acme")
    page.get_by_role("button", name="Make a key").click()
    expect(page.locator("#new-key")).to_be_visible()
    expect(page.locator("#usage-bars rect")).to_have_count(1)
    check(page, "access")


@pytest.mark.parametrize("screen", SCREENS)
def test_batches_are_for_everybody(guarded: Served, house: House, new_page: NewPage, screen: str) -> None:
    page = new_page(guarded.url, bypass_csp=True, **SCREENS[screen])
    page.locator("#key").fill(house.key("acme")["authorization"].removeprefix("Bearer "))
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("link", name="Batches").click()
    page.locator("#batch-file").set_input_files({"name": "a.jsonl", "mimeType": "text/plain", "buffer": b"{}"})
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator("#batch-list")).to_contain_text("validating")
    check(page, "batches")


def test_the_description_has_an_index_in_which_words_are_found(demo: Served, new_page: NewPage) -> None:
    page = new_page(demo.url)
    page.goto(f"{demo.url}/docs")
    link = page.get_by_role("link", name="POST /v1/completions", exact=True)
    expect(link).to_be_visible()
    page.get_by_label("Find a path").fill("dynatemp_range")
    expect(page.locator("#parts-found")).to_have_text(f"{page.locator('.index a:visible').count()} found")
    expect(link).to_be_hidden()
    page.get_by_role("link", name="NativeRequest").click()
    expect(page.locator("details[open] th", has_text="dynatemp_range").first).to_be_visible()
    page.get_by_role("link", name="Playground", exact=True).click()
    expect(page.locator("#chips input")).to_have_count(4)
    page.goto(f"{demo.url}/docs/")
    assert page.url == f"{demo.url}/docs"


def test_a_part_of_the_description_is_opened_once_and_takes_no_focus_while_a_model_loads(
    demo: Served, new_page: NewPage
) -> None:
    page = new_page(demo.url)
    page.get_by_role("link", name="API", exact=True).click()
    page.get_by_role("link", name="NativeRequest").click()
    expect(page.locator("#api-parts details[open]")).to_have_count(1)
    page.get_by_label("Find a path").focus()
    look_while_loading(page)
    assert page.evaluate("document.activeElement.id") == "find-part"


def test_colours_follow_the_system_and_change_with_it(demo: Served, new_page: NewPage) -> None:
    page = new_page(demo.url, color_scheme="light")
    background = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) != light
