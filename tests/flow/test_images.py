"""Images from bytes to bytes: documented forms, hostile files, company; and models that take none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from serve_app.api.dialects import DIALECTS
from serve_app.api.limits import WireLimits
from serve_app.engine.decoder.config_check import check_config
from serve_app.engine.vision.encoder import ImageCache, VisionEncoder
from serve_app.engine.vision.support import VisionSupport
from serve_app.http.settings import HttpSettings
from tests.engine.gated_tower import GatedTower
from tests.engine.harness import core_of, engine_of
from tests.engine.test_image_files import BOMB, HOSTILE, png
from tests.families.sighted import LLAVA, QWEN2_VL, Sighted, save_sighted, whole_model
from tests.flow.stack import Stack, running_stack
from tests.pictures import encoded, picture, sent

pytestmark = pytest.mark.slow

MAX_TOKENS = 6
TEXT = "What is <image> here?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llava")
    save_sighted(LLAVA, made)
    return made


@pytest.fixture
async def stack(folder: Path) -> AsyncIterator[Stack]:
    async with running_stack(**of(folder)) as running:
        yield running


def of(folder: Path, **changes: Any) -> dict[str, Any]:
    settings = {"num_replicas": 1, "path": str(folder), "adapters": None, "threads": 1, "max_num_sequences": 8}
    return {**settings, "max_image_pixels": 10_000, **changes}


@torch.inference_mode()
def expected(kind: Sighted, folder: Path, text: str, *seeds: int) -> list[int]:
    """transformers' own tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = kind.inputs(tokenizer, kind.processor(), text, [picture(seed) for seed in seeds])
    out = whole_model(folder).generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
    return [int(token) for token in out[0, inputs["input_ids"].shape[1] :]]


async def tokens(stack: Stack, **body: Any) -> list[list[int]]:
    answer = await stack.complete(max_tokens=MAX_TOKENS, return_token_ids=True, **body)
    return [choice["token_ids"] for choice in answer["choices"]]


async def test_every_form_of_a_prompt_with_images_gives_transformers_own_tokens(stack: Stack, folder: Path) -> None:
    one, other = (expected(LLAVA, folder, TEXT, seed) for seed in (1, 2))
    assert one != other
    assert await tokens(stack, prompt=TEXT, images=[sent(1)]) == [one]
    assert await tokens(stack, prompt=TEXT, images=[sent(1, as_uri=False)]) == [one]
    assert await tokens(stack, prompt=[TEXT, TEXT], images=[[sent(2)], [sent(1)]], n=2) == [other, other, one, one]
    tagged = {"prompt_string": "What is <__media__> here?", "multimodal_data": [sent(2, as_uri=False)]}
    assert await tokens(stack, prompt=tagged) == [other]
    for service in stack.services:
        images = engine_of(service).images
        assert images is not None
        assert images.num_encoded == 2, "each image was seen once"


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_image_as_fireworks_documents_it_is_seen_in_every_dialect(
    stack: Stack, folder: Path, dialect: str
) -> None:
    members = {"prompt": TEXT, "images": [sent(3, "JPEG")], "max_tokens": 1, "temperature": 0, "repetition_penalty": 1}
    response = await stack.post({"model": "demo", "return_token_ids": True, **members}, dialect=dialect)
    assert response.status_code == 200, response.text
    again = await tokens(stack, prompt=TEXT, images=[sent(3, "JPEG")])
    assert response.json()["choices"][0]["token_ids"] == again[0][:1]


async def test_models_whose_marker_is_another_have_it_put_for_the_common_one(tmp_path: Path) -> None:
    save_sighted(QWEN2_VL, tmp_path)
    text = "Two: <image> and <image>, are they one?"
    wanted = expected(QWEN2_VL, tmp_path, text, 1, 2)
    async with running_stack(**of(tmp_path)) as stack:
        assert await tokens(stack, prompt=text, images=[sent(1), sent(2)]) == [wanted]
        answer = await stack.complete(prompt="an <image> tag", max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == len("an <image> tag"), "without images it is text"


async def test_an_answer_counts_images_as_tokens_and_echoes_the_prompt_as_it_was_sent(stack: Stack) -> None:
    plain = await stack.complete(prompt=TEXT, images=[sent(1)], max_tokens=2)
    assert plain["usage"]["prompt_tokens"] == len(TEXT) - len("<image>") + 4
    echoed = await stack.complete(prompt=TEXT, images=[sent(1)], max_tokens=2, echo=True)
    assert echoed["choices"][0]["text"] == TEXT + plain["choices"][0]["text"]
    events = await stack.stream(prompt=TEXT, images=[sent(1)], max_tokens=2)
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == plain["choices"][0]["text"]
    native = await stack.post(
        {"prompt": {"prompt_string": TEXT, "multimodal_data": [sent(1)]}, "n_predict": 2, "temperature": 0},
        "/completion",
    )
    assert native.status_code == 200, native.text
    assert native.json()["prompt"] == TEXT


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_file_is_a_400_for_its_sender_and_nothing_for_its_neighbour(
    stack: Stack, folder: Path, name: str
) -> None:
    body = {"model": "demo", "prompt": TEXT, "images": [encoded(HOSTILE[name][0]())], "max_tokens": 2}
    response, neighbour = await asyncio.gather(stack.post(body), tokens(stack, prompt=TEXT, images=[sent(1)]))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "images[0]"
    assert len(error["message"]) < 400
    assert neighbour == [expected(LLAVA, folder, TEXT, 1)]
    await stack.settled()


async def test_a_broken_image_ends_a_stream_before_it_begins(stack: Stack) -> None:
    bomb = encoded(png(50_000, 50_000, BOMB))
    response = await stack.post({"model": "demo", "prompt": TEXT, "images": [bomb], "stream": True})
    assert response.status_code == 400
    assert "pixels" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"prompt": TEXT}, "a place and no image"),
        ({"prompt": TEXT, "images": [sent(1), sent(2)]}, "which is 1"),
        ({"prompt": [259, 70, 71]}, "a place and no image"),
        ({"prompt": ["<image>", 259], "images": [sent(1)]}, "1 images and more places"),
        ({"prompt": "<image>" * 6 + "x" * 500, "images": [sent(1)] * 6}, "context"),
        ({"prompt": "x" * 600 + "<image>", "images": [sent(1)], "truncate_sequence": True}, "context"),
    ],
)
async def test_what_the_model_cannot_read_is_a_400(stack: Stack, members: dict[str, Any], words: str) -> None:
    response = await stack.post({"model": "demo", **members})
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]
    await stack.settled()


async def test_texts_go_on_while_an_image_is_seen(stack: Stack, folder: Path) -> None:
    service, vision = stack.services[0], check_config(folder).vision
    assert isinstance(vision, VisionSupport)
    tower = GatedTower(core_of(service).model, vision)
    engine_of(service).images = VisionEncoder(
        tower, kept=ImageCache(1 << 20), max_model_len=512, max_waiting_bytes=1 << 20
    )
    tower.gate.clear()
    illustrated = asyncio.create_task(tokens(stack, prompt=TEXT, images=[sent(7)]))
    while tower.num_read == 0:  # noqa: ASYNC110, it is read in another thread
        await asyncio.sleep(0.001)
    before = core_of(service).num_steps
    plain = await stack.complete(prompt="Only text", max_tokens=20, ignore_eos=True)
    assert plain["usage"]["completion_tokens"] == 20
    assert core_of(service).num_steps - before >= 20
    assert not illustrated.done()
    tower.gate.set()
    assert len((await illustrated)[0]) > 0


async def test_a_model_of_text_refuses_images_by_name() -> None:
    async with running_stack(num_replicas=1, threads=1) as stack:
        for members in ({"images": [sent(1)]}, {"prompt": {"prompt_string": TEXT, "multimodal_data": [sent(1)]}}):
            response = await stack.post({"model": "demo", "prompt": TEXT, **members})
            assert response.status_code == 400
            assert "completes text only" in response.json()["error"]["message"]
        assert (await stack.complete(prompt=TEXT, max_tokens=1))["usage"]["prompt_tokens"] > 1
        assert (await stack.get("/props")).json()["modalities"] == {"vision": False, "audio": False}


async def test_a_model_whose_images_are_off_says_so_and_completes_text(folder: Path) -> None:
    async with running_stack(**of(folder, images=False)) as stack:
        response = await stack.post({"model": "demo", "prompt": TEXT, "images": [sent(1)]})
        assert response.status_code == 400
        assert "switched images off" in response.json()["error"]["message"]
        await stack.complete(prompt="text", max_tokens=1)


async def test_images_are_counted_at_the_door(folder: Path) -> None:
    settings = HttpSettings(limits=WireLimits(max_images=2))
    async with running_stack(**of(folder), settings=settings) as stack:
        assert (await stack.get("/props")).json()["modalities"]["vision"] is True
        response = await stack.post({"model": "demo", "prompt": "<image>" * 3, "images": [sent(1)] * 3})
        assert response.status_code == 400
        assert "at most 2 images" in response.json()["error"]["message"]
