"""Somebody with nothing but a browser, an address and a key, who uses the console of a real cluster.

    flock a-lock python -m tests.cluster.visitor

Starts a service of its own with keys, and kills HAProxy in the middle of a text.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect, sync_playwright

from tests.cluster.house import House, with_keys
from tests.cluster.started import REPOSITORY
from tests.console.conftest import ANSWERED, PATIENCE_MS, UNANSWERED, chromium

MODELS = ("demo", "demo:pirate", "demo:shout")
PROXY = "haproxy"
SOME = re.compile(r"\w+ \w+ ")
LONG = "1900"
"""Tokens, so many that a person stops it."""


@contextmanager
def browsing() -> Iterator[Page]:
    """A page whose scripts raise nothing, and ask for nothing that the policy forbids."""
    faults: list[str] = []
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1240, "height": 830})
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: faults.append(line.text) if line.type in ("error", "warning") else None)
        yield page
        browser.close()
    assert [fault for fault in faults if not fault.startswith((ANSWERED, UNANSWERED))] == []


def walk(page: Page, url: str, key: str, *, lose: Callable[[], object]) -> None:
    """From the bare address to the end of a visit. lose: ends whatever listens; it comes back by itself"""
    page.goto(url)
    assert page.url == f"{url}/console", "the address alone leads to the console"
    sign_in(page, key)
    complete(page)
    compare(page)
    stop(page)
    break_a_parameter(page)
    look_at_replicas(page)
    see_it_lost_and_come_back(page, lose)


def sign_in(page: Page, key: str) -> None:
    expect(page.get_by_role("heading", name="This service asks for a key")).to_be_visible()
    page.get_by_label("Key", exact=True).fill(f"{key}x")
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("#sign-in-problem")).to_contain_text("status: 401")
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("#state")).to_have_text("Connected")
    expect(page.locator("#chips input")).to_have_count(4)


def complete(page: Page) -> None:
    """Streamed: what is there grows, and what was there stays."""
    tick(page, "demo")
    page.get_by_label("temperature", exact=True).fill("0")
    page.get_by_label("max_tokens", exact=True).fill("200")
    page.locator("#run").click()
    text = page.locator(".answer .text")
    expect(text).to_contain_text(" ")
    before = str(text.text_content())
    expect(page.locator("#summary")).to_contain_text("written, in")
    after = str(text.text_content())
    assert after.startswith(before)
    assert len(after) > len(before)


def compare(page: Page) -> None:
    """Three models, one prompt, three texts."""
    tick(page, *MODELS)
    page.get_by_label("max_tokens", exact=True).fill("40")
    page.locator("#run").click()
    expect(page.locator("#summary")).to_contain_text("written, in")
    texts = [str(each.text_content()) for each in page.locator(".answer .text").all()]
    assert len(set(texts)) == len(MODELS), texts


def stop(page: Page) -> None:
    tick(page, "demo")
    page.get_by_label("Add a parameter").select_option("ignore_eos")
    page.get_by_label("ignore_eos", exact=True).select_option("true")
    page.get_by_label("max_tokens", exact=True).fill(LONG)
    page.locator("#run").click()
    expect(page.locator(".answer .text")).to_contain_text(SOME)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".answer .tag")).to_have_text("stopped by you")
    assert len(str(page.locator(".answer .text").text_content())) > 1


def break_a_parameter(page: Page) -> None:
    control = page.get_by_label("temperature", exact=True)
    control.fill("9")
    page.locator("#run").click()
    for fact in ("temperature", "status: 400", "request id"):
        expect(page.locator("#problem")).to_contain_text(fact)
    assert control.get_attribute("aria-invalid") == "true"
    control.fill("0")


def look_at_replicas(page: Page) -> None:
    page.get_by_role("link", name="Live", exact=True).click()
    expect(page.locator("#replicas tbody tr")).to_have_count(1)
    expect(page.locator("#tiles")).to_contain_text("Sequences running")
    page.get_by_role("link", name="Playground").first.click()


def see_it_lost_and_come_back(page: Page, lose: Callable[[], object]) -> None:
    """In the middle of a text, which stays; then the page goes on by itself, key and all."""
    page.locator("#run").click()
    expect(page.locator(".answer .text")).to_contain_text(SOME)
    lose()
    expect(page.locator(".answer .tag")).to_have_text("broke off")
    assert len(str(page.locator(".answer .text").text_content())) > 1
    expect(page.locator("#lost")).to_contain_text("does not answer")
    expect(page.locator("#state")).to_have_text("Connected")
    expect(page.locator("#lost")).to_be_hidden()
    page.get_by_label("max_tokens", exact=True).fill("20")
    page.locator("#run").click()
    expect(page.locator("#summary")).to_contain_text("written, in")


def tick(page: Page, *names: str) -> None:
    for box in page.locator("#chips input").all():
        box.set_checked(box.get_attribute("value") in names)


def with_keys_and_adapters(content: dict[str, Any]) -> None:
    with_keys(content)
    (demo,) = (each for each in content["applications"] if each["name"] == "demo")
    demo["args"]["adapters"] = str(REPOSITORY / "adapters" / "demo")


def visit(house: House) -> None:
    """The whole walk, with a key that is good for models and for what is live."""
    house.command("keys", "create", "--admin")
    house.command("tenants", "add", "visitors")
    key = house.command("keys", "create", "visitors", "--scopes", "infer", "metrics")["key"]
    house.run.until_ready()
    house.check_known(key)

    def lose() -> None:
        (proxy,) = (each for each in house.run.processes() if each.program == PROXY)
        os.kill(proxy.pid, signal.SIGKILL)

    with browsing() as page:
        walk(page, house.run.url, key, lose=lose)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        visited = House(Path(temporary), with_keys_and_adapters)
        try:
            visit(visited)
        finally:
            visited.run.end()
    print("complete, stream, compare, stop, a refused parameter, replicas, lost and back: all of it was seen")
