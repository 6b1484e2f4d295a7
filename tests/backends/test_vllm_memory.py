"""vLLM's memory for keys and values, as a replica tells of it while there is too little."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.flow.stack import running_stack

BUDGET = 5 * 393216
"""Four blocks of 128 tokens, and the one that stands for none."""


async def test_who_was_preempted_is_counted_after_it_has_ended() -> None:
    vllm = {"enforce_eager": True}
    memory = {"kv_cache_bytes": BUDGET, "max_model_len": 512}
    async with running_stack(num_replicas=1, engine="vllm", vllm=vllm, **memory) as stack:
        core: Any = stack.services[0].engine.core  # type: ignore[attr-defined]
        assert (core.load.num_blocks + 1) * core.load.block_bytes == BUDGET
        asked: list[Awaitable[Any]] = [
            stack.complete(model="demo", prompt=f"Once {number}", max_tokens=300, ignore_eos=True)
            for number in range(3)
        ]
        await asyncio.gather(*asked)
        await stack.settled()
        assert core.load.num_preemptions > 0
