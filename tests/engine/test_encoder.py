"""Encoding images: beside the steps, each once, within bounds, and not for those who have left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.core.errors import ContextOverflow, InvalidRequest, Overloaded
from serve_app.core.prompt import MARKER, Image, Prompt
from serve_app.core.request import GenerationRequest
from serve_app.core.shares import Share
from serve_app.engine.decoder.config_check import check_config
from serve_app.engine.decoder.loading import load_model
from serve_app.engine.vision.encoder import ImageCache, VisionEncoder
from serve_app.engine.vision.support import VisionSupport
from tests.engine.gated_tower import GatedTower
from tests.engine.harness import config, request
from tests.families.sighted import LLAVA, save_sighted
from tests.pictures import file_of, picture

ROW_BYTES = 4 * 32 * 4  # four rows of 32 numbers
FILE_BYTES = len(file_of(picture(1)))

MakeEncoder = Callable[..., VisionEncoder]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llava")
    save_sighted(LLAVA, made)
    return made


@pytest.fixture
def tower(folder: Path) -> GatedTower:
    vision = check_config(folder).vision
    assert isinstance(vision, VisionSupport)
    return GatedTower(load_model(config(folder)), vision)


@pytest.fixture
async def make_encoder(tower: GatedTower) -> AsyncIterator[MakeEncoder]:
    made: list[VisionEncoder] = []

    def make(
        *, max_bytes: int = 100 * ROW_BYTES, max_model_len: int = 512, max_waiting_bytes: int = 1 << 20
    ) -> VisionEncoder:
        kept = ImageCache(max_bytes)
        made.append(VisionEncoder(tower, kept=kept, max_model_len=max_model_len, max_waiting_bytes=max_waiting_bytes))
        return made[-1]

    yield make
    tower.gate.set()
    for each in made:
        await asyncio.to_thread(each.close)


def asked(name: str, *seeds: int) -> GenerationRequest:
    images = [Image(data=file_of(picture(seed)), name=f"images[{at}]") for at, seed in enumerate(seeds)]
    return replace(request(name), prompt=Prompt(parts=(MARKER * len(seeds),)).with_images(images, MARKER))


def of(tenant: str, request: GenerationRequest) -> GenerationRequest:
    return replace(request, cache_salt=f"tenant {tenant}", share=Share(flow=tenant))


def always(name: str) -> bool:
    return True


async def test_an_image_is_decoded_and_seen_once_however_many_ask_for_it(
    make_encoder: MakeEncoder, tower: GatedTower
) -> None:
    encoder = make_encoder()
    both = await asyncio.gather(encoder.encode([asked("a", 1, 2)], always), encoder.encode([asked("b", 2, 1)], always))
    again = await encoder.encode([asked("c", 1, 1), asked("d")], always)
    assert encoder.num_encoded == len(encoder.kept) == 2
    assert tower.num_read <= 4
    assert both[0]["a"] == tuple(reversed(both[1]["b"]))
    assert again == {"c": (both[0]["a"][0],) * 2, "d": ()}


async def test_what_is_kept_is_within_its_budget_and_the_last_used_stays(
    make_encoder: MakeEncoder,
) -> None:
    encoder = make_encoder(max_bytes=2 * ROW_BYTES)
    for seed in (1, 2, 1, 3, 1):
        await encoder.encode([asked(str(seed), seed)], always)
        assert encoder.kept.num_bytes <= 2 * ROW_BYTES
    assert (encoder.num_encoded, encoder.kept.num_hits) == (3, 2)
    await encoder.encode([asked("2", 2)], always)
    assert encoder.num_encoded == 4


@pytest.mark.law("Caches are apart")
async def test_requests_of_different_salts_have_no_image_in_common(make_encoder: MakeEncoder) -> None:
    """Whose image is answered sooner would have learned that another tenant has sent it."""
    encoder = make_encoder()
    for tenant in "abab":
        await encoder.encode([of(tenant, asked(tenant, 1))], always)
    assert (encoder.num_encoded, encoder.kept.num_hits, len(encoder.kept)) == (2, 2, 2)


@pytest.mark.law("Caches are apart")
async def test_a_flood_of_one_flow_drives_out_its_own_and_nobody_elses(
    make_encoder: MakeEncoder,
) -> None:
    """However many salts its sender makes up."""
    encoder = make_encoder(max_bytes=4 * ROW_BYTES)
    await encoder.encode([of("a", asked("a", 1))], always)
    for seed in range(2, 12):
        await encoder.encode([replace(of("b", asked(str(seed), seed)), cache_salt=f"b{seed}")], always)
    assert encoder.kept.num_bytes == 4 * ROW_BYTES
    before = encoder.num_encoded
    await encoder.encode([of("a", asked("again", 1))], always)
    assert encoder.num_encoded == before


async def test_one_that_was_seen_before_does_not_wait_for_another_to_be_seen(
    make_encoder: MakeEncoder, tower: GatedTower
) -> None:
    encoder = make_encoder()
    await encoder.encode([asked("first", 1)], always)
    tower.gate.clear()
    waiting = [asyncio.create_task(encoder.encode([asked(str(seed), seed)], always)) for seed in (2, 3, 4)]
    async with asyncio.timeout(30):
        await encoder.encode([asked("second", 1)], always)
    assert not any(task.done() for task in waiting)
    assert tower.num_read <= 3, "no more than two are decoded ahead"
    tower.gate.set()
    await asyncio.gather(*waiting)


async def test_what_waits_to_be_seen_is_bounded_in_bytes(make_encoder: MakeEncoder, tower: GatedTower) -> None:
    encoder = make_encoder(max_waiting_bytes=2 * FILE_BYTES + 100)
    tower.gate.clear()
    waiting = asyncio.create_task(encoder.encode([asked("a", 1, 2)], always))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await encoder.encode([asked("b", 3)], always)
    assert caught.value.retry_after_s is not None
    assert await encoder.encode([asked("text")], always) == {"text": ()}
    tower.gate.set()
    await waiting
    assert len((await encoder.encode([asked("b", 3)], always))["b"]) == 1


async def test_nothing_is_seen_for_those_who_have_left(make_encoder: MakeEncoder, tower: GatedTower) -> None:
    encoder, here = make_encoder(), {"a", "b"}
    tower.gate.clear()
    tasks = [asyncio.create_task(encoder.encode([asked(name, *seeds)], here.__contains__)) for name, seeds in
             (("a", (1, 2, 3)), ("b", (4, 5, 6)))]  # fmt: skip
    while tower.num_read < 2:  # noqa: ASYNC110, it is read in another thread
        await asyncio.sleep(0.001)
    here.clear()
    tower.gate.set()
    assert await asyncio.gather(*tasks) == [{"a": ()}, {"b": ()}]
    assert (encoder.num_encoded, tower.num_read) == (2, 2)


async def test_every_header_is_looked_at_before_anything_is_seen(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder()
    broken = Image(data=file_of(picture(1), "JPEG")[:20], name="images[2]")
    good = asked("a", 1, 2)
    parts = (*good.prompt.parts, broken)
    with pytest.raises(InvalidRequest) as caught:
        await encoder.encode([replace(good, prompt=Prompt(parts=parts))], always)
    assert caught.value.param == "images[2]"
    assert encoder.num_encoded == 0


async def test_images_that_overfill_the_context_are_refused_before_one_is_seen(
    make_encoder: MakeEncoder,
) -> None:
    encoder = make_encoder(max_model_len=9)
    with pytest.raises(ContextOverflow) as caught:
        await encoder.encode([asked("a", 1, 2, 3, 4, 5)], always)
    assert caught.value.facts == {"n_prompt_tokens": 12, "n_ctx": 9}
    assert encoder.num_encoded == 0
    assert len((await encoder.encode([asked("b", 1, 2)], always))["b"]) == 2
    with pytest.raises(ContextOverflow):
        await encoder.encode([asked("c", 1, 3, 2, 4)], always)
    assert encoder.num_encoded == 2
