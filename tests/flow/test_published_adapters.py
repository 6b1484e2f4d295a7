"""Adapters are published, replaced, rolled back and withdrawn under requests; every text is of one version."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM

from serve_app.catalog.adapters import read_published
from serve_app.core.adapters import AdapterSet, PublishedAdapter
from serve_app.core.errors import AdapterUnusable, InvalidRequest
from serve_app.router.fleet import Fleet
from serve_app.router.publishing import Publishing
from serve_app.router.watching import Watching
from tests.engine.adapter_files import save_adapter
from tests.engine.conftest import DEMO
from tests.flow.stack import Stack, running_stack

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

PROMPT = "Once upon a time there was"
NAME = "demo:tale"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One adapter per folder: the two versions, of ranks and modules that differ, and one that is refused.

    Its modules are those of the first: a replica matches each choice of modules once, in a process of its own.
    """
    out = tmp_path_factory.mktemp("published")
    model = AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True, dtype="float32")
    save_adapter(out / "v1", model, rank=4, seed=1, targets=("q_proj", "v_proj"))
    save_adapter(out / "v2", model, rank=24, seed=2)
    save_adapter(out / "bad", model, rank=4, down=1e19, up=1e19, targets=("q_proj", "v_proj"))
    return out


@pytest.fixture(scope="module")
def texts(folders: Path) -> dict[str | None, str]:
    """What each version says where it was there at start; None is the base."""

    async def ask() -> dict[str | None, str]:
        async with running_stack(num_replicas=1, adapters=str(folders)) as stack:
            names = {None: "demo", "v1": "demo:v1", "v2": "demo:v2"}
            return {version: await text_of(stack, name) for version, name in names.items()}

    found = asyncio.run(ask())
    assert len(set(found.values())) == 3, "some say the same"
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    """Two replicas that began without adapters."""
    async with running_stack(num_replicas=2, adapters=None) as made:
        yield made


async def text_of(stack: Stack, model: str, **more: Any) -> str:
    answer = await stack.complete(model=model, prompt=PROMPT, max_tokens=24, **more)
    return str(answer["choices"][0]["text"])


def published(folders: Path, folder: str, before: str | None = None) -> PublishedAdapter:
    path = folders / folder
    previous = None if before is None else (version_of(folders / before), str(folders / before))
    return PublishedAdapter(base="demo", name="tale", version=version_of(path), path=str(path), previous=previous)


def version_of(path: Path) -> str:
    return read_published(path, "x").version


async def publish(stack: Stack, revision: int, adapter: PublishedAdapter | None) -> None:
    """As a router does: stage on every replica, apply on every replica, see the cards."""
    if adapter is not None:
        staged = (each.stage_adapter(adapter.name, adapter.path, adapter.version) for each in stack.services)
        await asyncio.gather(*staged)
    adapters, withdrawn = ((adapter,), ()) if adapter is not None else ((), (("demo", "tale"),))
    for service in stack.services:
        await service.apply_adapters(AdapterSet(revision=revision, adapters=adapters, withdrawn=withdrawn))
    await stack.greet()


@pytest.mark.law("Adapters")
async def test_texts_are_of_one_version_while_versions_change_under_them(
    stack: Stack, folders: Path, texts: dict[str | None, str]
) -> None:
    seen: list[tuple[str, str]] = []
    is_over = asyncio.Event()

    async def keep_asking(model: str) -> None:
        while not is_over.is_set():
            seen.append((model, await text_of(stack, model)))

    await publish(stack, 1, published(folders, "v1"))
    askers = [asyncio.create_task(keep_asking(model)) for model in [NAME] * 6 + ["demo"] * 4]
    changes = [(2, "v2", "v1"), (3, "v1", "v2"), (4, "v2", "v1"), (5, "v1", "v2")]
    for revision, folder, before in changes:
        begun = len(seen)
        await publish(stack, revision, published(folders, folder, before))
        assert await text_of(stack, NAME) == texts[folder], "once it is published, every answer is the new one's"
        while len(seen) < begun + 10:  # noqa: ASYNC110, others ask
            await asyncio.sleep(0.01)
    is_over.set()
    await asyncio.gather(*askers)
    of_base = {text for model, text in seen if model == "demo"}
    of_adapter = {text for model, text in seen if model == NAME}
    assert of_base == {texts[None]}
    assert of_adapter == {texts["v1"], texts["v2"]}
    await publish(stack, 6, None)
    answer = await stack.post({"model": NAME, "prompt": PROMPT, "max_tokens": 4})
    assert answer.status_code in {400, 404}
    assert await text_of(stack, "demo") == texts[None]
    await stack.settled()


async def test_a_bad_adapter_is_refused_with_the_reason_and_harms_nobody(
    stack: Stack, folders: Path, texts: dict[str | None, str]
) -> None:
    await publish(stack, 7, published(folders, "v1"))
    asked = [asyncio.create_task(text_of(stack, model)) for model in (NAME, "demo") * 4]
    bad = published(folders, "bad")
    for service in stack.services:
        with pytest.raises(AdapterUnusable, match="its values are too large"):
            await service.stage_adapter("tale", bad.path, bad.version)
        with pytest.raises(InvalidRequest, match="changed meanwhile"):
            await service.stage_adapter("tale", bad.path, "0" * 32)
        with pytest.raises(AdapterUnusable, match="is missing"):
            await service.stage_adapter("tale", str(folders / "nothing"), bad.version)
    assert await asyncio.gather(*asked) == [texts["v1"], texts[None]] * 4
    await stack.greet()
    assert await text_of(stack, NAME) == texts["v1"]


async def test_a_replica_that_starts_loads_what_is_published_and_says_what_is_gone(
    folders: Path, texts: dict[str | None, str], tmp_path: Path
) -> None:
    folder = tmp_path / "tale"
    shutil.copytree(folders / "v1", folder)
    adapter = replace(published(folders, "v2"), previous=(version_of(folder), str(folder)))
    lost = PublishedAdapter(base="demo", name="lost", version="0" * 32, path=str(tmp_path / "lost"))
    async with running_stack(num_replicas=1, adapters=str(tmp_path)) as stack:
        assert await text_of(stack, NAME) == texts["v1"], "the folder rules while nothing is published"
        [service] = stack.services
        assert service.card.model.adapters_root == str(tmp_path)
        card = await service.apply_adapters(AdapterSet(revision=7, adapters=(adapter, lost)))
        assert {each.name: each.is_usable for each in card.adapters} == {"tale": True, "lost": False}
        assert [each.version for each in card.staged] == [version_of(folder)]
        assert service.card.num_routers_behind == 1
        await stack.greet()
        assert service.card.num_routers_behind == 0
        assert await text_of(stack, NAME) == texts["v2"]
        refused = await stack.post({"model": "demo:lost", "prompt": PROMPT})
        assert refused.status_code == 400
        assert "is missing" in refused.text
        shutil.rmtree(folder)
        await service.apply_adapters(AdapterSet(revision=8, adapters=(adapter,)))
        assert service.card.residency.num_loads == 2


async def test_folders_that_are_watched_are_served_by_themselves(
    folders: Path, texts: dict[str | None, str], tmp_path: Path
) -> None:
    watched = tmp_path / "adapters"
    watched.mkdir()
    async with running_stack(num_replicas=2, adapters={"path": str(watched), "watch": True}) as stack:
        publishing = Publishing(stack.fleet)
        watching = Watching(stack.fleet, publishing)

        async def look_twice() -> None:
            for _ in range(2):
                for service in stack.services:
                    publishing.put(await service.hello(stack.fleet.router_id), service)
                await watching.look()

        await look_twice()
        for folder in ("v1", "v2"):
            copied = shutil.copytree(folders / folder, tmp_path / folder)
            shutil.rmtree(watched / "tale", ignore_errors=True)
            copied.rename(watched / "tale")
            await look_twice()
            assert [await text_of(stack, NAME) for _ in range(4)] == [texts[folder]] * 4
        shutil.copytree(folders / "bad", watched / "bad")
        await look_twice()
        assert "its values are too large" in str(publishing.entry("demo", "bad").refused)
        assert (await stack.post({"model": "demo:bad", "prompt": PROMPT})).status_code == 404
        assert await text_of(stack, NAME) == texts["v2"]


async def test_a_router_that_did_not_publish_hears_of_it_without_asking(stack: Stack) -> None:
    [service, _] = stack.services
    other, is_outdated = Fleet("router-1"), asyncio.Event()
    other.on_outdated = is_outdated.set
    other.put(await service.hello("router-1"), service)
    try:
        async with asyncio.timeout(60):
            while not is_outdated.is_set():  # its stream may not be open yet
                revision = service.card.model.adapters_revision + 1
                await service.apply_adapters(AdapterSet(revision=revision))
                await asyncio.sleep(0.01)
        other.put(await service.hello("router-1"), service)
        is_outdated.clear()
        await service.apply_adapters(AdapterSet(revision=1))
        assert not is_outdated.is_set(), "what it knows is no news"
    finally:
        await other.close()
