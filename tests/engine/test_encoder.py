"""Looking at images: beside the steps, each once, within bounds, and not for those who have left."""

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
from serve_app.engine.decoder.judgement import judge
from serve_app.engine.decoder.loading import load_model
from serve_app.engine.vision.encoder import Looking, SeenImages
from serve_app.engine.vision.support import Sight
from tests.engine.gated_eyes import GatedEyes
from tests.engine.harness import config, request
from tests.families.sighted import LLAVA, save_sighted
from tests.pictures import file_of, picture

ROW_BYTES = 4 * 32 * 4  # four rows of 32 numbers
FILE_BYTES = len(file_of(picture(1)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llava")
    save_sighted(LLAVA, made)
    return made


@pytest.fixture
def eyes(folder: Path) -> GatedEyes:
    sight = judge(folder).sight
    assert isinstance(sight, Sight)
    return GatedEyes(load_model(config(folder)), sight)


@pytest.fixture
async def looking(eyes: GatedEyes) -> AsyncIterator[Callable[..., Looking]]:
    made: list[Looking] = []

    def make(
        *, max_bytes: int = 100 * ROW_BYTES, max_model_len: int = 512, max_waiting_bytes: int = 1 << 20
    ) -> Looking:
        kept = SeenImages(max_bytes)
        made.append(Looking(eyes, kept=kept, max_model_len=max_model_len, max_waiting_bytes=max_waiting_bytes))
        return made[-1]

    yield make
    eyes.gate.set()
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
    looking: Callable[..., Looking], eyes: GatedEyes
) -> None:
    looks = looking()
    both = await asyncio.gather(looks.encode([asked("a", 1, 2)], always), looks.encode([asked("b", 2, 1)], always))
    again = await looks.encode([asked("c", 1, 1), asked("d")], always)
    assert looks.num_seen == len(looks.kept) == 2
    assert eyes.num_read <= 4
    assert both[0]["a"] == tuple(reversed(both[1]["b"]))
    assert again == {"c": (both[0]["a"][0],) * 2, "d": ()}


async def test_what_is_kept_is_within_its_budget_and_the_last_used_stays(looking: Callable[..., Looking]) -> None:
    looks = looking(max_bytes=2 * ROW_BYTES)
    for seed in (1, 2, 1, 3, 1):
        await looks.encode([asked(str(seed), seed)], always)
        assert looks.kept.num_bytes <= 2 * ROW_BYTES
    assert (looks.num_seen, looks.kept.num_hits) == (3, 2)
    await looks.encode([asked("2", 2)], always)
    assert looks.num_seen == 4


@pytest.mark.law("Caches are apart")
async def test_requests_of_different_salts_have_no_image_in_common(looking: Callable[..., Looking]) -> None:
    """Whose image is answered sooner would have learned that another tenant has sent it."""
    looks = looking()
    for tenant in "abab":
        await looks.encode([of(tenant, asked(tenant, 1))], always)
    assert (looks.num_seen, looks.kept.num_hits, len(looks.kept)) == (2, 2, 2)


@pytest.mark.law("Caches are apart")
async def test_a_flood_of_one_flow_drives_out_its_own_and_nobody_elses(looking: Callable[..., Looking]) -> None:
    """However many salts its sender makes up."""
    looks = looking(max_bytes=4 * ROW_BYTES)
    await looks.encode([of("a", asked("a", 1))], always)
    for seed in range(2, 12):
        await looks.encode([replace(of("b", asked(str(seed), seed)), cache_salt=f"b{seed}")], always)
    assert looks.kept.num_bytes == 4 * ROW_BYTES
    before = looks.num_seen
    await looks.encode([of("a", asked("again", 1))], always)
    assert looks.num_seen == before


async def test_one_that_was_seen_before_does_not_wait_for_another_to_be_seen(
    looking: Callable[..., Looking], eyes: GatedEyes
) -> None:
    looks = looking()
    await looks.encode([asked("first", 1)], always)
    eyes.gate.clear()
    waiting = [asyncio.create_task(looks.encode([asked(str(seed), seed)], always)) for seed in (2, 3, 4)]
    async with asyncio.timeout(30):
        await looks.encode([asked("second", 1)], always)
    assert not any(task.done() for task in waiting)
    assert eyes.num_read <= 3, "no more than two are decoded ahead"
    eyes.gate.set()
    await asyncio.gather(*waiting)


async def test_what_waits_to_be_seen_is_bounded_in_bytes(looking: Callable[..., Looking], eyes: GatedEyes) -> None:
    looks = looking(max_waiting_bytes=2 * FILE_BYTES + 100)
    eyes.gate.clear()
    waiting = asyncio.create_task(looks.encode([asked("a", 1, 2)], always))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await looks.encode([asked("b", 3)], always)
    assert caught.value.retry_after_s is not None
    assert await looks.encode([asked("text")], always) == {"text": ()}
    eyes.gate.set()
    await waiting
    assert len((await looks.encode([asked("b", 3)], always))["b"]) == 1


async def test_nothing_is_seen_for_those_who_have_left(looking: Callable[..., Looking], eyes: GatedEyes) -> None:
    looks, here = looking(), {"a", "b"}
    eyes.gate.clear()
    tasks = [asyncio.create_task(looks.encode([asked(name, *seeds)], here.__contains__)) for name, seeds in
             (("a", (1, 2, 3)), ("b", (4, 5, 6)))]  # fmt: skip
    while eyes.num_read < 2:  # noqa: ASYNC110, it is read in another thread
        await asyncio.sleep(0.001)
    here.clear()
    eyes.gate.set()
    assert await asyncio.gather(*tasks) == [{"a": ()}, {"b": ()}]
    assert (looks.num_seen, eyes.num_read) == (2, 2)


async def test_every_header_is_looked_at_before_anything_is_seen(looking: Callable[..., Looking]) -> None:
    looks = looking()
    broken = Image(data=file_of(picture(1), "JPEG")[:20], name="images[2]")
    good = asked("a", 1, 2)
    parts = (*good.prompt.parts, broken)
    with pytest.raises(InvalidRequest) as caught:
        await looks.encode([replace(good, prompt=Prompt(parts=parts))], always)
    assert caught.value.param == "images[2]"
    assert looks.num_seen == 0


async def test_images_that_overfill_the_context_are_refused_before_one_is_seen(looking: Callable[..., Looking]) -> None:
    looks = looking(max_model_len=9)
    with pytest.raises(ContextOverflow) as caught:
        await looks.encode([asked("a", 1, 2, 3, 4, 5)], always)
    assert caught.value.facts == {"n_prompt_tokens": 12, "n_ctx": 9}
    assert looks.num_seen == 0
    assert len((await looks.encode([asked("b", 1, 2)], always))["b"]) == 2
    with pytest.raises(ContextOverflow):
        await looks.encode([asked("c", 1, 3, 2, 4)], always)
    assert looks.num_seen == 2
