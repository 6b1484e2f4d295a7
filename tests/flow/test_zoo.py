"""The zoo: what is hostile costs its sender a refusal, what only looks so is answered; nobody else sees any of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from benchmarks.zoo import Animal, animals, template
from tests.families.sighted import LLAVA, save_sighted
from tests.flow.stack import Stack, running_stack

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

KINDS = ("regex", "schema", "grammar", "template", "chat", "image")
INNOCENT = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
MAX_TIMES = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("llava")
    save_sighted(LLAVA, folder)
    async with running_stack(
        num_replicas=1, path=str(folder), adapters=None, threads=1, chat_template=template()
    ) as running:
        yield running


async def sent(stack: Stack, animal: Animal) -> tuple[Animal, int, dict[str, Any]]:
    """Again where too many of them take long at once, as it is told."""
    for _ in range(MAX_TIMES):
        response = await stack.post(animal.body, animal.path)
        if response.status_code != 503:
            break
        await asyncio.sleep(float(response.headers["retry-after"]) / 2)
    return animal, response.status_code, response.json()


@pytest.mark.parametrize("kind", KINDS)
async def test_the_hostile_are_refused_the_harmless_answered_and_their_neighbours_text_is_as_ever(
    stack: Stack, kind: str
) -> None:
    alone = (await stack.complete(**INNOCENT))["choices"][0]["token_ids"]
    zoo = [animal for animal in animals("demo", 1) if animal.kind == kind]
    assert len(zoo) > 1
    answers, neighbour = await asyncio.gather(
        asyncio.gather(*(sent(stack, animal) for animal in zoo)), stack.complete(**INNOCENT)
    )
    for animal, status, said in answers:
        assert status == (400 if animal.is_hostile else 200), f"{animal.name}: {status} {said}"
        if animal.is_hostile:
            error = said["error"]
            param = (error["param"] or "").partition("[")[0]
            is_named = param in animal.body if param else "request body" in error["message"]
            assert is_named, f"{animal.name}: {error}"
    assert neighbour["choices"][0]["token_ids"] == alone
    await stack.settled()
