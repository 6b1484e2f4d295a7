"""The zoo of hostile inputs: each costs its sender a refusal, or is cheap to follow; nobody else sees any of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.bench.zoo import Animal, animals, template
from tests.families.sighted import LLAVA, save_sighted
from tests.flow.stack import Stack, running_stack

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

KINDS = ("regex", "schema", "grammar", "template", "chat", "image")
INNOCENT = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
MAY_BE_FOLLOWED = ("regex", "schema", "grammar")
"""Of these some ask for much and are cheap to follow, as nothing of them is computed before its token has come."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("llava")
    save_sighted(LLAVA, folder)
    async with running_stack(
        num_replicas=1, path=str(folder), adapters=None, threads=1, chat_template=template()
    ) as running:
        yield running


async def sent(stack: Stack, animal: Animal) -> tuple[Animal, int, str]:
    response = await stack.post(animal.body, animal.path)
    return animal, response.status_code, response.text[:300]


@pytest.mark.parametrize("kind", KINDS)
async def test_each_is_refused_or_followed_and_its_neighbours_text_is_as_ever(stack: Stack, kind: str) -> None:
    alone = (await stack.complete(**INNOCENT))["choices"][0]["token_ids"]
    zoo = [animal for animal in animals("demo", 1) if animal.kind == kind]
    assert len(zoo) > 1
    answers, neighbour = await asyncio.gather(
        asyncio.gather(*(sent(stack, animal) for animal in zoo)), stack.complete(**INNOCENT)
    )
    expected = (200, 400, 503) if kind in MAY_BE_FOLLOWED else (400,)  # 503: too many of them take long at once
    for animal, status, said in answers:
        assert status in expected, f"{animal.name}: {status} {said}"
    assert neighbour["choices"][0]["token_ids"] == alone
    await stack.settled()
