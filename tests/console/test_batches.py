"""Batches in the console: sent, followed, saved, cancelled; and what was wrong with a file."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from starlette.types import ASGIApp

from tests.console.conftest import NewPage
from tests.console.served import Served
from tests.console.test_access import sign_in
from tests.flow.batching import BatchHouse, Node, backend, requests

pytestmark = pytest.mark.slow


@pytest.fixture
def house(tmp_path: Path) -> BatchHouse:
    return BatchHouse(tmp_path, f"sqlite:///{tmp_path / 'store.db'}")


@pytest.fixture
def nodes() -> list[Node]:
    """The one that is served, once it is."""
    return []


@pytest.fixture
def served(house: BatchHouse, nodes: list[Node]) -> Iterator[Served]:
    @asynccontextmanager
    async def built() -> AsyncIterator[ASGIApp]:
        nodes.append(Node(house, [backend()]))
        yield nodes[0].transport.app
        await nodes[0].kill()

    made = Served(built)
    yield made
    made.close()


@pytest.fixture
def page(served: Served, house: BatchHouse, new_page: NewPage) -> Page:
    opened = new_page(served.url)
    sign_in(opened, house.keys["acme"])
    opened.get_by_role("link", name="Batches").click()
    expect(opened.locator("#batch-list")).to_contain_text("There is no batch yet")
    return opened


def send(page: Page, name: str, lines: list[dict[str, object]]) -> dict[str, Any]:
    """Return the batch that a file of these lines became."""
    content = "\n".join(map(json.dumps, lines)).encode()
    page.locator("#batch-file").set_input_files({"name": name, "mimeType": "application/jsonl", "buffer": content})
    with page.expect_response(lambda answer: answer.url.endswith("/v1/batches")) as answered:
        page.get_by_role("button", name="Send", exact=True).click()
    expect(page.get_by_role("row", name=name)).to_contain_text("validating")
    made: dict[str, Any] = answered.value.json()
    return made


def test_a_file_is_sent_followed_and_its_answers_are_saved(served: Served, nodes: list[Node], page: Page) -> None:
    batch = send(page, "words.jsonl", requests(3))
    served.run(nodes[0].until(batch["id"]))
    row = page.get_by_role("row", name="words.jsonl")
    expect(row).to_contain_text("completed")
    expect(row).to_contain_text("3 of 3, ")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save answers of words.jsonl").click()
    assert download.value.suggested_filename == "words-answers.jsonl"
    found = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
    assert [each["custom_id"] for each in found] == ["own-0", "own-1", "own-2"]


def test_progress_goes_on_after_a_look_that_was_refused(served: Served, nodes: list[Node], page: Page) -> None:
    batch = send(page, "words.jsonl", requests(3))
    page.route("**/v1/batches?*", lambda route: route.fulfill(status=503, body="{}"))
    expect(page.locator("#batches-problem")).to_contain_text("503")
    page.unroute("**/v1/batches?*")
    served.run(nodes[0].until(batch["id"]))
    expect(page.get_by_role("row", name="words.jsonl")).to_contain_text("completed")
    expect(page.locator("#batches-problem")).to_be_empty()


def test_one_is_cancelled_and_a_wrong_file_is_told_of(served: Served, nodes: list[Node], page: Page) -> None:
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator("#send-batch")).to_contain_text("Choose a file first")
    batch = send(page, "chats.jsonl", [{"custom_id": "a", "method": "GET", "url": "/v1/chat/completions", "body": {}}])
    assert batch["endpoint"] == "/v1/chat/completions"
    send(page, "words.jsonl", requests(3))
    words = page.get_by_role("row", name="words.jsonl")
    for _ in range(2):
        words.get_by_role("button", name="Cancel").click()
    expect(words).to_contain_text("cancelling")
    served.run(nodes[0].until(batch["id"]))
    expect(page.get_by_role("row", name="chats.jsonl")).to_contain_text(re.compile("failed Line 1: .*method"))
