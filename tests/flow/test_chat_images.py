"""Images in a chat: in the places that the model's own template writes, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.families.sighted import LLAVA, QWEN2_VL, Sighted, save_sighted
from tests.flow.stack import Stack, running_stack
from tests.flow.test_images import expected, of
from tests.pictures import sent

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARKER{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MARKERS = {"llava": "<image>", "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>"}
PATH = "/v1/chat/completions"


def template(kind: Sighted) -> str:
    return TEMPLATE.replace("MARKER", MARKERS[kind.name])


def image(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": sent(seed), "detail": "low"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def asking(*parts: Any, **members: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": list(parts)}], "temperature": 0, "max_tokens": 6}
    return {**body, "return_token_ids": True, **members}


async def tokens(stack: Stack, body: dict[str, Any]) -> list[int]:
    response = await stack.post(body, PATH)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


@pytest.mark.parametrize("kind", [LLAVA, QWEN2_VL], ids=lambda kind: kind.label)
async def test_parts_of_a_message_are_seen_as_transformers_sees_them(kind: Sighted, tmp_path: Path) -> None:
    save_sighted(kind, tmp_path)
    wanted = expected(kind, tmp_path, "user: See <image> and <image>?\nassistant:", 1, 2)
    async with running_stack(**of(tmp_path, chat_template=template(kind))) as stack:
        parts = (text("See "), image(1), text(" and "), image(2), text("?"))
        assert await tokens(stack, asking(*parts)) == wanted
        bare = [part if part["type"] == "text" else {**part, "image_url": part["image_url"]["url"]} for part in parts]
        assert await tokens(stack, asking(*bare)) == wanted
        said = await stack.post(asking(text("Hello")), PATH)
        assert said.json()["usage"]["prompt_tokens"] == len("user: Hello\nassistant:"), "a list even without images"


async def test_a_marker_that_a_user_writes_is_no_place_for_an_image(tmp_path: Path) -> None:
    save_sighted(LLAVA, tmp_path)
    async with running_stack(**of(tmp_path, chat_template=template(LLAVA))) as stack:
        words = "an <image> tag, <ima"
        answer = await stack.post(asking(text(words), image(1), text("ge>")), PATH)
        assert answer.status_code == 200, answer.text
        length = len(f"user: {words}ge>\nassistant:") + 4
        assert answer.json()["usage"]["prompt_tokens"] == length


FIRST = "messages[0].content[0]"
ASSISTANT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [image(1)]}]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (
            asking({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}),
            f"{FIRST}.image_url.url",
            "No address",
        ),
        (asking({"type": "image_url", "image_url": "file:///etc/passwd"}), f"{FIRST}.image_url", "No address"),
        (asking({"type": "image_url"}), f"{FIRST}.image_url", "found null"),
        (asking(*[image(1)] * 33), "messages", "at most 32 images"),
        (asking(messages=ASSISTANT), "messages[1].content[0].type", '"text"'),
        (asking(text("a"), images=[sent(1)]), "images", "images"),
        (asking({"type": "image_url", "image_url": sent(1)[:-40]}), f"{FIRST}.image_url", "image"),
    ],
)
async def test_what_is_no_image_of_a_chat_is_refused_by_its_place(
    tmp_path: Path, body: dict[str, Any], param: str, words: str
) -> None:
    save_sighted(LLAVA, tmp_path)
    async with running_stack(**of(tmp_path, chat_template=template(LLAVA))) as stack:
        response = await stack.post(body, PATH)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        assert words in response.json()["error"]["message"]


async def test_a_template_that_writes_no_place_for_an_image_is_a_400(tmp_path: Path) -> None:
    save_sighted(LLAVA, tmp_path)
    async with running_stack(**of(tmp_path, chat_template=TEMPLATE.replace("MARKER", ""))) as stack:
        response = await stack.post(asking(image(1)), PATH)
        assert response.status_code == 400
        assert "writes places for, which are 0" in response.json()["error"]["message"]
        response = await stack.post({"model": "demo", "messages": asking(image(1))["messages"]}, "/tokenize")
        assert response.status_code == 400
        assert "known when it is seen" in response.text


async def test_a_model_of_text_refuses_images_of_a_chat() -> None:
    async with running_stack(num_replicas=1, threads=1) as stack:
        response = await stack.post(asking(image(1)), PATH)
        assert response.status_code == 400
        assert "completes text only" in response.json()["error"]["message"]
