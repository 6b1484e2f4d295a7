"""What a person does first: complete, compare, chat, look at tokens, take the request elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.console.conftest import NewPage
from tests.console.served import Served
from tests.fakes import FakeBackend

pytestmark = pytest.mark.slow
ADAPTERS = ["demo:json", "demo:pirate", "demo:shout"]


def api(served: Served, **body: Any) -> dict[str, Any]:
    answered = httpx.post(f"{served.url}/v1/completions", json={"max_tokens": 64, "temperature": 0, **body}, timeout=60)
    assert answered.status_code == 200, answered.text
    found: dict[str, Any] = answered.json()
    return found


def complete(page: Page) -> None:
    """Run what is there until it is over."""
    page.locator("#run").click()
    expect(page.locator("#summary")).to_contain_text("written, in")


def answer_of(page: Page, name: str) -> Any:
    return page.get_by_role("article", name=f"Answer of {name}", exact=True)


def ticked(page: Page, *names: str) -> None:
    expect(page.locator("#chips input")).to_have_count(4)
    for box in page.locator("#chips input").all():
        box.set_checked(box.get_attribute("value") in names)


def test_one_press_completes_and_no_key_is_asked_for(demo: Served, new_page: NewPage) -> None:
    page = new_page(demo.url)
    expect(page.get_by_role("status").first).to_contain_text("Connected")
    expect(page.locator("#sign-in")).to_be_hidden()
    expect(page.get_by_role("link", name="Access")).to_be_hidden()
    ticked(page, "demo")
    complete(page)
    card = answer_of(page, "demo")
    assert len(card.locator(".text").inner_text()) > 20
    assert card.get_by_role("option").count() > 10
    assert page.title() == "Playground · serve_app"


def test_a_stream_and_a_whole_answer_show_what_the_service_says(demo: Served, new_page: NewPage) -> None:
    page = new_page(demo.url)
    ticked(page, "demo")
    page.get_by_label("temperature", exact=True).fill("0")
    said = api(demo, model="demo", prompt="Once upon a time", logprobs=5)["choices"][0]
    for streams in (True, False):
        page.get_by_label("Stream as it is written").set_checked(streams)
        complete(page)
        card = answer_of(page, "demo")
        assert card.locator(".text").text_content() == said["text"]
        tokens = card.get_by_role("option")
        assert tokens.count() == len(said["logprobs"]["tokens"])
        shown = [text for text in tokens.all_text_contents() if text != "▪"]
        assert "".join(shown) == said["text"]


def test_an_answer_that_comes_whole_tells_no_speed(demo: Served, new_page: NewPage) -> None:
    page = new_page(demo.url)
    ticked(page, "demo")
    page.get_by_label("Stream as it is written").uncheck()
    complete(page)
    expect(answer_of(page, "demo").locator("footer")).to_contain_text("first after")
    expect(answer_of(page, "demo").locator("footer")).not_to_contain_text("tokens/s")


def test_three_adapters_answer_side_by_side_as_each_does_alone(demo: Served, new_page: NewPage) -> None:
    page = new_page(demo.url)
    ticked(page, *ADAPTERS)
    page.get_by_label("temperature", exact=True).fill("0")
    page.get_by_label("Prompt", exact=True).fill("The cat")
    complete(page)
    for name in ADAPTERS:
        expected = api(demo, model=name, prompt="The cat")["choices"][0]["text"]
        assert answer_of(page, name).locator(".text").text_content() == expected
    boxes = [answer_of(page, name).bounding_box() for name in ADAPTERS]
    assert len({box["y"] for box in boxes if box}) == 1, "beside each other"


def test_a_mix_that_is_in_no_list_answers_beside_its_base(demo: Served, new_page: NewPage) -> None:
    page = new_page(demo.url)
    mix = "demo:pirate*0.6+shout*0.4"
    ticked(page, "demo")
    page.get_by_label("Another address").fill(mix)
    page.get_by_label("temperature", exact=True).fill("0")
    complete(page)
    for name in ("demo", mix):
        expected = api(demo, model=name, prompt="Once upon a time")["choices"][0]["text"]
        assert answer_of(page, name).locator(".text").text_content() == expected


def test_by_keyboard_alone_a_prompt_is_completed_and_its_tokens_are_looked_at(demo: Served, new_page: NewPage) -> None:
    page = new_page(demo.url)
    ticked(page, "demo")
    seen: list[str] = []
    while "prompt" not in seen:
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
        assert len(seen) < 40, seen
    assert seen[0] == "Skip to the content"
    page.keyboard.press("Control+a")
    page.keyboard.type("A bear")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#summary")).to_contain_text("written, in")
    while page.evaluate("document.activeElement.getAttribute('role')") != "listbox":
        page.keyboard.press("Tab")
        seen.append("")
        assert len(seen) < 80
    page.keyboard.press("Home")
    first = answer_of(page, "demo").locator(".inspector").inner_text()
    page.keyboard.press("ArrowRight")
    second = answer_of(page, "demo").locator(".inspector").inner_text()
    assert first != second
    assert "logprob" in second
    assert answer_of(page, "demo").get_by_label("What was likely here").get_by_role("listitem").count() >= 5
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "where the keyboard is can be seen"


def test_alternatives_are_those_of_the_service(demo: Served, new_page: NewPage) -> None:
    page = new_page(demo.url)
    ticked(page, "demo")
    page.get_by_label("temperature", exact=True).fill("0")
    complete(page)
    logprobs = api(demo, model="demo", prompt="Once upon a time", logprobs=5)["choices"][0]["logprobs"]
    card = answer_of(page, "demo")
    card.get_by_role("option").nth(3).hover()
    top = sorted(logprobs["top_logprobs"][3].items(), key=lambda each: -each[1])
    listed = card.get_by_label("What was likely here").locator(".piece").all_inner_texts()
    assert [text.replace("␣", " ").replace("⏎", "\n") for text in listed] == [text for text, _ in top]
    assert f"{logprobs['token_logprobs'][3]:.3f}" in card.locator(".inspector p").inner_text()


def test_a_chat_goes_on_with_each_model_and_starts_over(demo: Served, new_page: NewPage) -> None:
    page = new_page(demo.url)
    ticked(page, "demo", "demo:pirate")
    page.get_by_text("Chat", exact=True).click()
    page.get_by_label("temperature", exact=True).fill("0")
    complete(page)
    first = answer_of(page, "demo").locator(".text").text_content()
    assert "Paris" in str(first)
    shown = answer_of(page, "demo").get_by_role("option").all_text_contents()
    assert "".join(text for text in shown if text != "▪") == first, "what ends a turn is not its text"
    page.get_by_label("Message", exact=True).fill("And of Spain?")
    complete(page)
    turns = answer_of(page, "demo").locator(".turn").all_inner_texts()
    assert [turn.split("\n")[0] for turn in turns] == ["user", "assistant", "user"]
    assert first in turns[1]
    page.reload()
    expect(page.locator("#answers")).to_contain_text("The chat goes on where it was")
    page.get_by_role("button", name="Start over").click()
    expect(page.locator(".answer")).to_have_count(0)
    page.reload()
    expect(page.locator("#answers")).to_contain_text("press Send")


def test_a_reload_keeps_the_form_and_earlier_requests_come_back(demo: Served, new_page: NewPage) -> None:
    page = new_page(demo.url)
    ticked(page, "demo:pirate")
    page.get_by_label("temperature", exact=True).fill("0")
    page.get_by_label("Add a parameter").select_option("top_k")
    page.get_by_label("top_k", exact=True).fill("5")
    page.get_by_label("Prompt", exact=True).fill("The cat")
    complete(page)
    assert answer_of(page, "demo:pirate").locator(".prompt").text_content() == "The cat"
    wrote = answer_of(page, "demo:pirate").locator(".text").text_content()
    page.get_by_label("Prompt", exact=True).fill("Another")
    page.reload()
    expect(page.get_by_label("demo:pirate", exact=True)).to_be_checked()
    assert page.get_by_label("Prompt", exact=True).input_value() == "Another"
    assert page.get_by_label("top_k", exact=True).input_value() == "5"
    page.get_by_text("Earlier requests").click()
    page.locator("#past-list button").click()
    assert answer_of(page, "demo:pirate").locator(".text").text_content() == wrote
    assert page.get_by_label("Prompt", exact=True).input_value() == "The cat"
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as JSON").click()
    [saved] = json.loads(Path(download.value.path()).read_text())
    assert saved["answers"][0]["text"] == wrote
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as Markdown").click()
    document = Path(download.value.path()).read_text()
    answered = f"## demo:pirate\n\n**answer** ({saved['answers'][0]['end']})\n```\n{wrote}\n```"
    for part in ('* top_k: "5"', "**prompt**\n```\nThe cat\n```", answered):
        assert part in document


def test_enter_sends_a_chat_and_markdown_is_shown_as_elements(
    tiny: Served, backend: FakeBackend, new_page: NewPage
) -> None:
    page = new_page(tiny.url)
    ticked_one = page.locator("#chips input")
    expect(ticked_one).to_have_count(1)
    page.get_by_text("Chat", exact=True).click()
    page.get_by_label("Show how likely each token was").uncheck()
    page.get_by_label("Message", exact=True).press("Shift+Enter")
    assert page.locator("#summary").text_content() == ""
    page.get_by_label("Message", exact=True).press("Enter")
    expect(page.locator("#summary")).not_to_be_empty()
    source = (
        "# Head\n\n- one **bold**\n- `two`\n  1. inner\n\n```py\na < b\n```\nend *soft* ~~old~~ <i>x</i>\n\n"
        "| a | b |\n|---|---|\n| 1 | <b>2</b> |\n| x \\| y | 4 |\n\n---\n> said\n\n[a](javascript:alert(1)) ![b](x)\n\n"
        "1. outer\n\n   - within\n\n   ~~~\n   fenced\n   ~~~\n\n2. next\ngoes on ***both***, `c *d*`\n\n- other"
        + "\n"
        + ">" * 9999
    )
    show = "async (text) => document.body.append(...(await import('./console/markdown.js')).markdown(text))"
    page.evaluate(show, source)
    shown = page.locator("body")
    for kind, text in {
        "> h4": "Head", "> ul strong": "bold", "> ul code": "two", "> ul li ol li": "inner", "> pre code": "a < b",
        "> p em": "soft", "> p del": "old", "> div td:last-child": "<b>2</b>", "> hr": "", "> blockquote > p": "said",
        "> div tr:last-child td:first-child": "x | y", "> ol:nth-of-type(1) li:first-child ul li": "within",
        "> ol li pre code": "fenced", "> p strong em": "both", "> p em + code, > p strong + code": "c *d*",
        "> ul:last-of-type > li": "other",
    }.items():  # fmt: skip
        expect(shown.locator(f":scope {kind}").first).to_have_text(text)
    assert shown.locator("i, td b, > p a, > p img").count() == 0


def test_every_parameter_of_the_contract_can_be_added_with_its_range(demo: Served, new_page: NewPage) -> None:
    page = new_page(demo.url)
    document = httpx.get(f"{demo.url}/openapi.json", timeout=60).json()
    properties = document["components"]["schemas"]["CompletionRequest"]["properties"]
    ticked(page, "demo")
    for name in ("top_k", "ignore_eos", "context_length_exceeded_behavior", "logit_bias", "min_p"):
        page.get_by_label("Add a parameter").select_option(name)
        field = page.locator(f"[data-parameter={name}]")
        about = field.locator("span[id$=about]").text_content()
        assert str(about).rstrip(".") in properties[name]["description"].rstrip(".") + "."
    minimum, maximum = (page.get_by_label("min_p", exact=True).get_attribute(each) for each in ("min", "max"))
    schema = properties["min_p"]["anyOf"][0]
    assert (minimum, maximum) == (str(schema["minimum"]), str(schema["maximum"]))
    page.get_by_label("ignore_eos", exact=True).select_option("true")
    page.get_by_label("logit_bias", exact=True).fill('{"5": -100}')
    complete(page)
    assert answer_of(page, "demo").get_by_role("option").count() == 64
    page.get_by_role("button", name="Remove logit_bias").click()
    expect(page.locator("[data-parameter=logit_bias]")).to_have_count(0)


@pytest.mark.parametrize("language", ["curl", "Python"])
@pytest.mark.parametrize("kind", ["Completion", "Chat"])
def test_the_request_as_a_program_gives_the_same_text(
    demo: Served, new_page: NewPage, language: str, kind: str
) -> None:
    if language == "curl" and shutil.which("curl") is None:
        pytest.skip("no curl")
    page = new_page(demo.url)
    ticked(page, "demo:pirate")
    page.get_by_text(kind, exact=True).click()
    page.get_by_label("temperature", exact=True).fill("0")
    page.get_by_label("Stream as it is written").uncheck()
    for name, value in (("top_k", "5"), ("stop", 'it\'s "unlikely" $HOME\\n')):
        if name != "stop":
            page.get_by_label("Add a parameter").select_option(name)
        page.get_by_label(name, exact=True).fill(value)
    page.get_by_text("This request as curl or Python").click()
    page.get_by_role("button", name=language, exact=True).click()
    expect(page.locator("#code-text")).not_to_be_empty()  # written a moment after it was opened
    code = page.locator("#code-text").inner_text()
    command = ["bash", "-c", code] if language == "curl" else [sys.executable, "-W", "ignore", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    complete(page)
    text = str(answer_of(page, "demo:pirate").locator(".text").text_content())
    if language == "curl":
        choice = httpx.Response(200, text=ran.stdout).json()["choices"][0]
        assert (choice.get("text") or choice["message"]["content"]) == text
    else:
        assert ran.stdout == f"{text}\n"


def test_models_are_listed_and_lead_to_the_playground(demo: Served, new_page: NewPage) -> None:
    page = new_page(demo.url)
    page.get_by_role("link", name="Models", exact=True).click()
    rows = page.locator("#model-list").get_by_role("row")
    expect(rows).to_have_count(4)
    assert "2,048 tokens of context" in page.locator("#model-list").inner_text()
    page.get_by_role("link", name="Compare its adapters").click()
    boxes = page.locator("#chips input:checked")
    expect(boxes).to_have_count(3)
    assert [each.get_attribute("value") for each in boxes.all()] == ADAPTERS


def test_live_shows_the_replicas_and_what_they_write(demo: Served, new_page: NewPage) -> None:
    page = new_page(demo.url)
    page.get_by_role("link", name="Live", exact=True).click()
    row = page.locator("#replicas tbody tr")
    expect(row).to_have_count(1)
    steps = int(str(row.locator("td").nth(5).text_content()).replace(",", ""))
    api(demo, model="demo", prompt="Once upon a time", ignore_eos=True)
    expect(row.locator("td").nth(5)).not_to_have_text(f"{steps:,}")
    expect(page.locator("#chart polyline")).to_have_count(1)
    expect(page.locator("#tiles")).to_contain_text("Sequences running")
