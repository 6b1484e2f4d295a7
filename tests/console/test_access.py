"""Keys: the way in, what an administrator does, and what any other key sees."""

from __future__ import annotations

import time

import httpx
import pytest
from playwright.sync_api import Page, expect

from serve_app.core.ledger import Row
from tests.console.conftest import NewPage, look_while_loading
from tests.console.served import Served
from tests.flow.house import House

pytestmark = pytest.mark.slow


def sign_in(page: Page, key: str) -> None:
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Sign in").click()


def test_a_key_is_asked_for_is_kept_in_the_tab_alone_and_opens(
    guarded: Served, house: House, new_page: NewPage
) -> None:
    key = house.key("acme")["authorization"].removeprefix("Bearer ")
    page = new_page(guarded.url)
    expect(page.get_by_role("heading", name="This service asks for a key")).to_be_visible()
    expect(page.locator("#sections")).to_be_hidden()
    assert page.evaluate("document.activeElement.id") == "key"
    sign_in(page, "sa-" + "x" * 43)
    expect(page.locator("#sign-in-problem")).to_contain_text("status: 401")
    sign_in(page, key)
    expect(page.locator("#chips input")).to_have_count(2)
    page.get_by_role("button", name="Complete").click()
    expect(page.locator("#summary")).to_contain_text("written, in")
    kept = page.evaluate("[sessionStorage, localStorage].flatMap(Object.entries)")
    assert [name for name, text in kept if key in name + text] == ["serve_app.key"]
    assert page.evaluate("[localStorage['serve_app.key'], document.cookie]") == [None, ""]
    assert page.context.cookies() == []
    page.reload()
    expect(page.locator("#chips input")).to_have_count(2)
    page.get_by_text("This request as curl or Python").click()
    expect(page.locator("#code-text")).not_to_be_empty()  # written a moment after it was opened
    code = page.locator("#code-text").inner_text()
    assert "$SERVE_APP_KEY" in code
    assert key not in page.content()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="This service asks for a key")).to_be_visible()
    assert page.evaluate("sessionStorage.length + localStorage.length") == 0


def test_a_team_sees_its_own_usage_and_nothing_of_others(guarded: Served, house: House, new_page: NewPage) -> None:
    key = house.key("acme")["authorization"].removeprefix("Bearer ")
    house.key("rivals")
    at = time.time()
    rows = [
        Row(id=name, tenant=name, key_id="k", request_id=name, model="tiny", at=at, prompt_tokens=tokens)
        for name, tokens in (("acme", 1234), ("rivals", 98765))
    ]
    house.admin_service.ledger.record(rows, [], at)
    page = new_page(guarded.url)
    sign_in(page, key)
    page.get_by_role("link", name="Access").click()
    expect(page.locator("#usage")).to_contain_text("1,234")
    expect(page.get_by_role("heading", name="Tenants")).to_be_hidden()
    expect(page.get_by_role("heading", name="Keys", exact=True)).to_be_hidden()
    assert "rivals" not in page.content()
    assert "98,765" not in page.content()
    page.get_by_role("link", name="Live", exact=True).click()
    expect(page.locator("#live-problem")).to_contain_text('This key is not for "metrics"')


def test_an_administrator_adds_a_tenant_and_a_key_that_is_shown_once_and_can_be_revoked(
    guarded: Served, house: House, new_page: NewPage
) -> None:
    page = new_page(guarded.url)
    sign_in(page, house.admin)
    page.get_by_role("link", name="Access").click()
    page.locator("#tenant-name").fill("a b")
    page.get_by_role("button", name="Add a tenant").click()
    expect(page.locator("#add-tenant").get_by_role("alert")).to_contain_text("name must")
    expect(page.get_by_role("button", name="Add a tenant")).to_be_focused()
    page.locator("#tenant-name").fill("acme")
    page.locator("#tenant-models").fill("tiny, tiny:*")
    page.get_by_role("button", name="Add a tenant").click()
    expect(page.get_by_role("row", name="acme tiny, tiny:*")).to_be_visible()
    page.locator("#key-tenant").select_option("acme")
    page.get_by_role("button", name="Make a key").click()
    key = page.locator("#new-key .secret").inner_text()
    answered = listing(guarded, key)
    assert [each["id"] for each in answered.json()["data"]] == ["tiny", "tiny:sql"]
    page.reload()
    expect(page.get_by_role("row", name="acme infer")).to_be_visible()
    page.get_by_role("button", name="Edit acme").click()
    page.get_by_label("weight", exact=True).fill("3")
    page.get_by_label("tokens per minute", exact=True).fill("1000")
    page.get_by_label("max n", exact=True).fill("2")
    page.get_by_label("max n", exact=True).fill("-2")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator("#edit-tenant").get_by_role("alert")).to_be_in_viewport()
    page.get_by_label("max n", exact=True).fill("2")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator("#tenants")).to_contain_text("tokens per minute 1,000")
    assert (house.store.tenant("acme").weight, house.store.tenant("acme").max_n) == (3, 2)
    assert key not in page.content()
    revoke = page.get_by_role("row", name="acme infer").get_by_role("button", name="Revoke")
    revoke.click()
    expect(revoke).to_contain_text("press again")
    assert listing(guarded, key).status_code == 200
    revoke.click()
    expect(page.get_by_role("row", name="acme infer")).to_contain_text("revoked")
    assert listing(guarded, key).status_code == 401


def test_what_an_administrator_chose_and_is_told_stays_while_a_model_loads(
    guarded: Served, house: House, new_page: NewPage
) -> None:
    for name in ("acme", "rivals"):
        house.key(name)
    page = new_page(guarded.url)
    sign_in(page, house.admin)
    page.get_by_role("link", name="Access").click()
    page.locator("#key-tenant").select_option("rivals")
    page.locator("#tenant-name").fill("others")
    page.get_by_role("button", name="Add a tenant").click()
    expect(page.get_by_role("row", name="others *")).to_be_visible()
    page.locator("#tenant-name").fill("a b")
    page.get_by_role("button", name="Add a tenant").click()
    expect(page.locator("#add-tenant")).to_contain_text("name must")
    revoke = page.get_by_role("row", name="acme infer").get_by_role("button", name="Revoke")
    revoke.click()
    look_while_loading(page)
    expect(page.locator("#state")).to_have_text("Loading coming")
    expect(page.locator("#key-tenant")).to_have_value("rivals")
    expect(page.locator("#add-tenant")).to_contain_text("name must")
    expect(revoke).to_contain_text("press again")


def test_usage_is_drawn_by_day_and_divided_by_model_or_tenant(guarded: Served, house: House, new_page: NewPage) -> None:
    now = time.time()
    rows = [
        Row(id=f"{at}", tenant=tenant, key_id="k", request_id="r", model=model, at=at, completion_tokens=tokens)
        for tenant, model, at, tokens in (
            ("acme", "tiny", now, 30),
            ("acme", "tiny:sql", now - 1, 10),
            ("rivals", "tiny", now - 3 * 86_400, 20),
            ("rivals", "tiny", now - 40 * 86_400, 1000),
        )
    ]
    house.key("acme")
    house.key("rivals")
    house.admin_service.ledger.record(rows, [], now)
    page = new_page(guarded.url)
    sign_in(page, house.admin)
    page.get_by_role("link", name="Access").click()
    expect(page.locator("#usage-caption")).to_have_text("60 written tokens in 30 days, at most 40 in one")
    bars = page.locator("#usage-bars rect")
    today = time.strftime("%Y-%m-%d", time.gmtime(now))
    assert f"{today} tiny: 30" in bars.locator("title").all_text_contents()
    assert [float(str(bar.get_attribute("height"))) for bar in bars.all()] == pytest.approx([50, 75, 25])
    page.get_by_label("by", exact=True).select_option("tenant")
    assert page.locator("#usage-legend li").all_inner_texts() == ["acme 40", "rivals 20"]
    page.get_by_label("Show", exact=True).select_option("requests")
    expect(page.locator("#usage-caption")).to_have_text("3 requests in 30 days, at most 2 in one")
    page.get_by_label("in the last").select_option("90 days")
    expect(page.locator("#usage-caption")).to_have_text("4 requests in 90 days, at most 2 in one")


def test_a_key_is_made_once_however_often_its_button_is_pressed(
    guarded: Served, house: House, new_page: NewPage
) -> None:
    house.key("acme")
    page = new_page(guarded.url)
    sign_in(page, house.admin)
    page.get_by_role("link", name="Access").click()
    page.locator("#key-tenant").select_option("acme")
    page.get_by_role("button", name="Make a key").dblclick()
    expect(page.locator("#new-key")).to_be_visible()
    expect(page.get_by_role("row", name="acme infer")).to_have_count(2)
    expect(page.get_by_role("button", name="Make a key")).to_be_focused()


def test_who_has_a_key_reads_the_description_of_what_it_may_send(
    guarded: Served, house: House, new_page: NewPage
) -> None:
    page = new_page(guarded.url)
    page.goto(f"{guarded.url}/docs")
    sign_in(page, house.key("acme", max_n=3)["authorization"].removeprefix("Bearer "))
    page.get_by_role("link", name="CompletionRequest", exact=True).click()
    part = page.locator("details", has=page.locator("summary", has_text="CompletionRequest"))
    row = part.get_by_role("row").filter(has=page.get_by_role("rowheader", name="best_of", exact=True))
    expect(row).to_contain_text("1 to 3")
    assert page.evaluate("document.activeElement.textContent") == "CompletionRequest"


def listing(served: Served, key: str) -> httpx.Response:
    return httpx.get(f"{served.url}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=60)


def test_who_is_revoked_meanwhile_is_asked_again_and_told_why(guarded: Served, house: House, new_page: NewPage) -> None:
    key = house.key("acme")["authorization"].removeprefix("Bearer ")
    page = new_page(guarded.url)
    sign_in(page, key)
    expect(page.locator("#chips input")).to_have_count(2)
    [made] = house.store.keys("acme")
    admin = {"authorization": f"Bearer {house.admin}"}
    assert httpx.delete(f"{guarded.url}/admin/keys/{made.id}", headers=admin, timeout=60).status_code == 200
    page.get_by_role("button", name="Complete").click()
    expect(page.locator("#sign-in-problem")).to_contain_text("status: 401")
    assert page.evaluate("sessionStorage.length") == 0
