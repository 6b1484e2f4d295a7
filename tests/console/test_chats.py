"""Images and tools of chats: offered where the model takes them, sent as they were chosen."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import FilePayload, Page, expect

from serve_app.core.prompt import ImageCard
from serve_app.core.request import GenerationRequest
from tests.console.conftest import NewPage
from tests.console.served import Served, reciting
from tests.fakes import FakeBackend, model_card, replica_card
from tests.pictures import file_of, picture

pytestmark = pytest.mark.slow
CALL = ["<tool_call>", '{"name": "get_weather", ', '"arguments": {"city": "Rome"}}', "</tool_call>"]
IMAGE = file_of(picture(1))


DROP = """(message, bytes) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([new Uint8Array(bytes)], "two.png", { type: "image/png" }));
  message.dispatchEvent(new DragEvent("drop", { dataTransfer, cancelable: true }));
}"""


def recited(request: GenerationRequest, sample: int) -> list[str]:
    """A call where a tool is shown and has not answered."""
    source = "" if request.conversation is None else request.conversation.source
    return CALL if '"tools"' in source and '"role":"tool"' not in source else ["It is ", "sunny."]


@pytest.fixture
def served() -> Iterator[Served]:
    card = replace(model_card("tiny"), chat_template="{{ messages }} {{ tools }}", tool_parser="hermes")
    backend = FakeBackend(replica_card("r0", replace(card, images=ImageCard())), script=recited)
    made = Served(reciting(backend))
    yield made
    made.close()


def chat(page: Page) -> None:
    expect(page.locator("#chips input")).to_have_count(1)
    page.get_by_text("Chat", exact=True).click()
    page.get_by_label("Show how likely each token was").uncheck()


def sent_by(page: Page, button: str) -> list[dict[str, Any]]:
    """The messages of the request that a press on a button sends."""
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name=button, exact=True).click()
    expect(page.locator("#summary")).to_contain_text("written, in")
    body: Any = asked.value.post_data_json
    messages: list[dict[str, Any]] = body["messages"]
    return messages


def test_images_are_sent_with_the_message_shown_small_and_not_kept(served: Served, new_page: NewPage) -> None:
    page = new_page(served.url)
    chat(page)
    page.locator("#images").set_input_files(FilePayload(name="one.png", mimeType="image/png", buffer=IMAGE))
    page.locator("#message").evaluate(DROP, list(IMAGE))
    page.get_by_role("button", name="Remove one.png").click()
    expect(page.get_by_role("img", name="two.png")).to_have_attribute("width", "64")
    page.get_by_label("Message", exact=True).fill("What is it?")
    [message] = sent_by(page, "Send")
    url = f"data:image/png;base64,{base64.b64encode(IMAGE).decode()}"
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    assert message == {"role": "user", "content": parts}
    expect(page.locator(".turn").get_by_role("img", name="Image 1")).to_be_visible()
    expect(page.locator("#image-list li")).to_have_count(0)
    page.get_by_label("Message", exact=True).fill("And now?")
    assert len(sent_by(page, "Send")) == 3, "the image stays in the chat"
    assert page.evaluate("[localStorage, sessionStorage].flatMap(Object.values).join().includes('base64')") is False


def test_a_function_is_described_called_and_answered(served: Served, new_page: NewPage) -> None:
    page = new_page(served.url)
    chat(page)
    page.locator("#tools summary").click()
    page.get_by_role("button", name="Add a function").click()
    page.get_by_label("Arguments, as JSON Schema").fill("{")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator("#tools .fault")).to_contain_text("parameters")
    page.get_by_label("Arguments, as JSON Schema").fill('{"type": "object"}')
    page.get_by_label("Message", exact=True).fill("How is it in Rome?")
    sent_by(page, "Send")
    expect(page.locator(".calls pre")).to_have_text('get_weather({"city": "Rome"})')
    page.get_by_label("What get_weather gave").fill("22 degrees")
    messages = sent_by(page, "Send results")
    assert [each["role"] for each in messages] == ["user", "assistant", "tool"]
    [call] = messages[1]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    assert messages[2] == {"role": "tool", "tool_call_id": call["id"], "content": "22 degrees"}
    expect(page.locator(".answer .text")).to_have_text("It is sunny.")
    page.reload()
    expect(page.locator("#tool-list input").first).to_have_value("get_weather")


def test_a_model_that_takes_none_is_offered_none(tiny: Served, new_page: NewPage) -> None:
    page = new_page(tiny.url)
    chat(page)
    expect(page.locator("#tools")).to_be_hidden()
    expect(page.locator("#images")).to_be_hidden()


def test_answers_are_shown_as_markdown_where_that_is_chosen(served: Served, new_page: NewPage) -> None:
    page = new_page(served.url)
    chat(page)
    page.get_by_label("Show answers as Markdown").check()
    sent_by(page, "Send")
    expect(page.locator(".rendered p")).to_have_text("It is sunny.")
    expect(page.locator(".written")).to_be_hidden()
    page.get_by_role("button", name="Show what tiny wrote as Markdown").click()
    expect(page.locator(".written")).to_be_visible()
