"""Random schemas through the real engine: what ends by itself satisfies them."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter

import jsonschema
import pytest

from tests.constraints.schemas import random_schema
from tests.flow.stack import running_stack
from tools.demo_model.behaviours import BEHAVIOURS
from tools.demo_model.report import held_out_samples

NUM_SCHEMAS = int(os.environ.get("SCHEMA_CASES", "60"))
AT_ONCE = 60

KEYWORD = re.compile(r'"(\w+)"[\w ,"]* cannot be enforced')

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]


def reason_of(said: str) -> str:
    """The keyword that cannot be enforced, or what else was found."""
    found = KEYWORD.search(said)
    return f'"{found[1]}"' if found else said.rpartition("found this")[2].partition("'")[0][:60]


@pytest.mark.law("Constraints")
async def test_what_ends_by_itself_satisfies_its_schema() -> None:
    async with running_stack(num_replicas=1) as stack:

        async def asked(seed: int) -> tuple[int, int, str, str]:
            body = {"model": "demo:json", "prompt": "Record:", "json_schema": random_schema(seed), "seed": seed}
            body |= {"max_tokens": 80, "temperature": 1, "logit_bias": [['"', 4], ["}", 4], ["]", 4]]}
            response = await stack.post(body)
            while response.status_code == 503:  # a busy machine; it is told to come again, and does
                await asyncio.sleep(float(response.headers["retry-after"]))
                response = await stack.post(body)
            if response.status_code != 200:
                return seed, response.status_code, response.json()["error"]["message"], ""
            choice = response.json()["choices"][0]
            return seed, 200, choice["text"], choice["finish_reason"]

        answers = []
        for first in range(1000, 1000 + NUM_SCHEMAS, AT_ONCE):
            few = range(first, min(first + AT_ONCE, 1000 + NUM_SCHEMAS))
            answers += await asyncio.gather(*map(asked, few))
        ended = [(seed, text) for seed, status, text, reason in answers if status == 200 and reason == "stop"]
        assert len(ended) > NUM_SCHEMAS / 3
        for seed, text in ended:
            jsonschema.Draft202012Validator(random_schema(seed)).validate(json.loads(text))
        assert {status for _, status, _, _ in answers} <= {200, 400}
        refused = Counter(reason_of(said) for _, status, said, _ in answers if status == 400)
        print(f"{NUM_SCHEMAS} schemas, {len(ended)} ended and satisfy theirs, refused:", refused.most_common())
        await stack.settled()


FLAT = {"anyOf": [{"type": ["string", "number", "boolean"]}, {"type": "array", "items": {"type": "string"}}]}
RECORD = {"type": "object", "minProperties": 1, "additionalProperties": FLAT}
NUM_RECORDS = 40


async def test_every_record_of_the_json_adapter_is_valid_under_a_schema_however_hot_it_is_drawn() -> None:
    """Without the schema some are not at this temperature, so that the schema is what makes them valid."""
    behaviour = BEHAVIOURS["json"]
    prompts = [sample.prompt for sample in held_out_samples(behaviour.draw, NUM_RECORDS)]
    async with running_stack(num_replicas=1) as stack:

        async def ended(**changes: object) -> list[str]:
            body = {"model": "demo:json", "prompt": prompts, "seed": 3, "temperature": 1.5, "max_tokens": 120}
            response = await stack.post({**body, **changes})
            assert response.status_code == 200, response.text
            return [each["text"] for each in response.json()["choices"] if each["finish_reason"] == "stop"]

        free, held = await ended(), await ended(json_schema=RECORD)
        await stack.settled()
    assert not all(map(behaviour.is_shown, free))
    assert len(held) > NUM_RECORDS / 2
    assert all(map(behaviour.is_shown, held))
    for text in held:
        jsonschema.Draft202012Validator(RECORD).validate(json.loads(text))
