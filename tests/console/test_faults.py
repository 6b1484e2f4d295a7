"""What goes wrong: somebody stops, a parameter is refused, a model writes markup, the service is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect
from starlette.types import ASGIApp

from serve_app.http.app import build_app
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.console.conftest import NewPage
from tests.console.served import Served, reciting
from tests.fakes import FakeBackend

pytestmark = pytest.mark.slow


def begin(page: Page, served: Served, backend: FakeBackend, *, num_words: int) -> None:
    """Run, and let so many words be written."""
    expect(page.locator("#chips input")).to_have_count(1)
    page.get_by_role("button", name="Complete").click()
    expect(page.locator("#summary")).to_have_text("Writing …")
    while not served.call(lambda: backend.num_live):
        page.wait_for_timeout(10)
    for _ in range(num_words):
        served.call(backend.step)


def text_of(page: Page) -> str:
    return str(page.locator(".answer .text").text_content())


def test_stop_ends_the_stream_here_and_the_work_there(tiny: Served, backend: FakeBackend, new_page: NewPage) -> None:
    page = new_page(tiny.url)
    begin(page, tiny, backend, num_words=6)
    expect(page.locator(".answer .text")).to_contain_text("word word word")
    assert page.locator(".answer .text").get_attribute("aria-busy") == "true"
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".answer .tag")).to_have_text("stopped by you")
    expect(page.locator("#summary")).to_contain_text("Stopped after")
    while tiny.call(lambda: backend.num_live):
        page.wait_for_timeout(10)
    assert len(backend.aborted) == 1
    assert page.locator(".answer .text").get_attribute("aria-busy") == "false"
    before = text_of(page)
    page.wait_for_timeout(100)
    assert text_of(page) == before
    assert page.evaluate("document.activeElement.id") == "run", "the focus is not lost with the button"


def test_a_parameter_out_of_range_is_told_whole_and_marked(
    tiny: Served, backend: FakeBackend, new_page: NewPage
) -> None:
    page = new_page(tiny.url)
    expect(page.locator("#chips input")).to_have_count(1)
    control = page.get_by_label("temperature", exact=True)
    control.fill("9")
    page.get_by_role("button", name="Complete").click()
    body = {"model": "tiny", "prompt": "Once upon a time", "temperature": 9}
    error = httpx.post(f"{tiny.url}/v1/completions", json=body, timeout=60).json()["error"]
    told = page.locator("#problem")
    facts = ["status: 400", "param: temperature", "request id"]
    for fact in (error["message"], error["type"], error["error_code"], *facts):
        expect(told).to_contain_text(fact)
    assert control.get_attribute("aria-invalid") == "true"
    described = str(control.get_attribute("aria-describedby")).split()
    assert page.locator(f"#{described[-1]}").text_content() == error["message"]
    assert page.evaluate("document.activeElement.id") == "parameter-temperature"
    control.fill("")
    begin(page, tiny, backend, num_words=4)
    assert control.get_attribute("aria-invalid") is None
    expect(told).to_be_empty()


def test_a_refused_request_leaves_earlier_answers_and_escape_stops_from_anywhere(
    tiny: Served, backend: FakeBackend, new_page: NewPage
) -> None:
    page = new_page(tiny.url)
    begin(page, tiny, backend, num_words=6)
    expect(page.locator(".answer .text")).to_contain_text("word word")
    page.locator("body").click(position={"x": 2, "y": 2})
    page.keyboard.press("Escape")
    expect(page.locator(".answer .tag")).to_have_text("stopped by you")
    before = text_of(page)
    page.get_by_label("temperature", exact=True).fill("9")
    page.get_by_role("button", name="Complete").click()
    expect(page.locator("#problem")).to_contain_text("param: temperature")
    assert text_of(page) == before


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [("top_k", "many", "top_k"), ("logit_bias", "{", "logit_bias"), ("max_tokens", "1.5", "max_tokens")],
)
def test_what_no_control_forbids_the_service_refuses(
    tiny: Served, new_page: NewPage, name: str, value: str, param: str
) -> None:
    page = new_page(tiny.url)
    expect(page.locator("#chips input")).to_have_count(1)
    if name != "max_tokens":
        page.get_by_label("Add a parameter").select_option(name)
    control = page.get_by_label(name, exact=True)
    if value == "many":
        control.evaluate("(input) => { input.type = 'text'; input.value = 'many'; }")
    else:
        control.fill(value)
    page.get_by_role("button", name="Complete").click()
    expect(page.locator("#problem")).to_contain_text(f"param: {param}")
    expect(page.locator(f".marked[data-parameter={name}]")).to_have_count(1)


def test_no_model_chosen_and_an_unknown_one_are_refused_at_their_field(tiny: Served, new_page: NewPage) -> None:
    page = new_page(tiny.url)
    page.locator("#chips input").uncheck()
    page.get_by_role("button", name="Complete").click()
    expect(page.locator("fieldset[data-parameter=model] .fault")).to_contain_text("model")
    assert page.locator("#summary").text_content() == "", "nothing was sent"
    page.locator("#address").fill("nobody")
    page.get_by_role("button", name="Complete").click()
    expect(page.locator("#problem")).to_contain_text("model_not_found")


def test_markup_that_a_model_writes_is_text(tiny: Served, backend: FakeBackend, new_page: NewPage) -> None:
    page = new_page(tiny.url)
    for is_shaded in (True, False):
        page.get_by_label("Show how likely each token was").set_checked(is_shaded)
        begin(page, tiny, backend, num_words=41)
        while tiny.call(lambda: (backend.step(), backend.num_live)[1]):
            pass
        expect(page.locator("#summary")).to_contain_text("written, in")
        assert "<b>bold</b><script>document.title = 'taken'</script><img src=x onerror=alert(1)>" in text_of(page)
        assert page.locator(".answer b, .answer script, .answer img").count() == 0
    assert page.title() == "Playground · serve_app"


def test_a_text_that_is_still_written_is_shown_as_markdown_as_it_grows(
    tiny: Served, backend: FakeBackend, new_page: NewPage
) -> None:
    page = new_page(tiny.url)
    begin(page, tiny, backend, num_words=4)
    expect(page.locator(".answer .text")).to_contain_text("word")
    page.get_by_role("button", name="Show what tiny wrote as Markdown").click()
    for _ in range(3):
        tiny.call(backend.step)
    expect(page.locator(".answer > .rendered")).to_contain_text("word word word word")


def test_no_script_can_make_markup_of_a_text(tiny: Served, browser: Browser) -> None:
    """The policy holds whatever the scripts are like."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{tiny.url}/console")
    made = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; return 'made'; } catch (error) { return error.name; } }"
    )
    context.close()
    assert made == "TypeError"


def test_a_lost_service_is_shown_keeps_what_was_written_and_comes_back(
    tiny: Served, backend: FakeBackend, new_page: NewPage
) -> None:
    page = new_page(tiny.url, viewport={"width": 360, "height": 500})
    begin(page, tiny, backend, num_words=5)
    expect(page.locator(".answer .text")).to_contain_text("word word")
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    tiny.be_lost()
    expect(page.locator("#lost")).to_contain_text("does not answer")
    expect(page.locator("#lost")).to_be_in_viewport()
    expect(page.locator("#state")).to_have_text("Not reachable")
    expect(page.locator(".answer .tag")).to_have_text("broke off")
    expect(page.locator(".answer .problem")).to_contain_text("The service was lost")
    assert "word word" in text_of(page)
    page.get_by_role("button", name="Complete").click()
    expect(page.locator("#problem")).to_contain_text("The service was lost")
    tiny.come_back()
    expect(page.locator("#state")).to_have_text("Connected")
    expect(page.locator("#lost")).to_be_hidden()
    begin(page, tiny, backend, num_words=5)
    expect(page.locator(".answer .text")).to_contain_text("word word")


def test_a_request_of_which_nothing_had_come_is_sent_once_more(
    tiny: Served, backend: FakeBackend, new_page: NewPage
) -> None:
    page = new_page(tiny.url)
    num_sent = 0

    def break_first(route: Route) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 1:
            route.abort("connectionreset")
        else:
            route.continue_()

    page.route("**/v1/*completions", break_first)
    begin(page, tiny, backend, num_words=5)
    expect(page.locator(".answer .text")).to_contain_text("word word")
    assert num_sent == 2


def test_while_models_load_it_says_so_and_fills_by_itself(backend: FakeBackend, new_page: NewPage) -> None:
    fleet = Fleet("router-0")
    fleet.expect(["tiny"])

    @asynccontextmanager
    async def built() -> AsyncIterator[ASGIApp]:
        yield build_app(Router(fleet))
        await fleet.close()

    served = Served(built)
    page = new_page(served.url)
    expect(page.locator("#state")).to_have_text("Loading tiny")
    expect(page.locator("#chips")).to_contain_text("No model is ready yet")
    page.get_by_role("link", name="Live", exact=True).click()
    expect(page.get_by_role("row", name="tiny loading")).to_be_visible()
    expect(page.locator("#replicas")).to_contain_text("No replica is ready")
    page.get_by_role("link", name="Models", exact=True).click()
    expect(page.locator("#model-list")).to_contain_text("No model is ready yet")
    served.call(lambda: fleet.put(backend.card, backend))
    expect(page.get_by_role("heading", name="tiny")).to_be_visible()
    expect(page.locator("#state")).to_have_text("Connected")
    served.close()


def test_a_refusal_stays_while_the_page_looks_for_a_model_that_loads(backend: FakeBackend, new_page: NewPage) -> None:
    fleet = Fleet("router-0")
    fleet.expect(["tiny", "coming"])
    served = Served(reciting(backend, given=fleet))
    page = new_page(served.url)
    expect(page.locator("#state")).to_have_text("Loading coming")
    page.get_by_label("temperature", exact=True).fill("9")
    page.get_by_role("button", name="Complete").click()
    for _ in range(2):
        with page.expect_response("**/v1/models"):
            expect(page.locator("#problem")).to_contain_text("param: temperature")
    expect(page.locator(".marked[data-parameter=temperature]")).to_have_count(1)
    served.close()


def test_live_goes_on_by_itself_when_the_service_is_back(tiny: Served, new_page: NewPage) -> None:
    page = new_page(tiny.url)
    page.get_by_role("link", name="Live", exact=True).click()
    expect(page.locator("#replicas tbody tr")).to_have_count(1)
    tiny.be_lost()
    expect(page.locator("#state")).to_have_text("Not reachable")
    tiny.come_back()
    expect(page.locator("#state")).to_have_text("Connected")
    before = page.evaluate("document.querySelector('#chart polyline')?.getAttribute('points')")
    expect(page.locator("#chart polyline")).not_to_have_attribute("points", before or "")
