"""Random schemas through the real engine: what ends by itself satisfies them."""

from __future__ import annotations

import asyncio
import json

import jsonschema
import pytest

from tests.constraints.schemas import random_schema
from tests.flow.stack import running_stack

NUM_SCHEMAS = 60

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]


async def test_what_ends_by_itself_satisfies_its_schema() -> None:
    async with running_stack(num_replicas=1) as stack:

        async def asked(seed: int) -> tuple[int, int, str, str]:
            body = {"model": "demo:json", "prompt": "Record:", "json_schema": random_schema(seed), "seed": seed}
            body |= {"max_tokens": 80, "temperature": 1, "logit_bias": [['"', 4], ["}", 4], ["]", 4]]}
            response = await stack.post(body)
            if response.status_code != 200:
                return seed, response.status_code, response.json()["error"]["message"], ""
            choice = response.json()["choices"][0]
            return seed, 200, choice["text"], choice["finish_reason"]

        answers = await asyncio.gather(*(asked(seed) for seed in range(1000, 1000 + NUM_SCHEMAS)))
        ended = [(seed, text) for seed, status, text, reason in answers if status == 200 and reason == "stop"]
        assert len(ended) > NUM_SCHEMAS / 3
        for seed, text in ended:
            jsonschema.Draft202012Validator(random_schema(seed)).validate(json.loads(text))
        assert {status for _, status, _, _ in answers} <= {200, 400}
        await stack.settled()
