"""Measures what appending forced tokens at once saves.

    python -m benchmarks.bench_forced

The embedded model writes records of a schema, the same ones with and without, in runs that take turns: prints tokens,
those that were forced, steps, and the median of the ratio of the times.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from tests.engine.harness import core_of
from tests.flow.stack import Stack, running_stack

RECORD = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 9999},
        "classification": {"enum": ["positive", "negative", "undecided"]},
        "explanation": {"type": "string", "maxLength": 40},
        "is_confirmed_by_a_person": {"type": "boolean"},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 20},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "postal_code"],
        },
    },
    "required": ["identifier", "classification", "explanation", "is_confirmed_by_a_person", "address"],
    "additionalProperties": False,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "with white space": {"json_schema": RECORD},
    "compact": {"structured_outputs": {"json": RECORD, "disable_any_whitespace": True}},
}
ROUNDS = 7


def body(**members: Any) -> dict[str, Any]:
    prompts = [f"Record {number}:" for number in range(4)]
    return {"model": "demo", "prompt": prompts, "seed": 7, "max_tokens": 160, "return_token_ids": True, **members}


async def cost(stack: Stack, members: dict[str, Any]) -> tuple[float, int, int, int, list[str]]:
    """Seconds, steps, forced tokens, tokens, texts."""
    engine = core_of(stack.services[0])
    before = engine.num_steps, engine._output.num_forced
    started = time.perf_counter()
    answer = (await stack.post(body(**members))).json()
    seconds = time.perf_counter() - started
    await stack.settled()
    texts = [choice["text"] for choice in answer["choices"]]
    steps, forced = engine.num_steps - before[0], engine._output.num_forced - before[1]
    return seconds, steps, forced, answer["usage"]["completion_tokens"], texts


async def measure_saving() -> None:
    async with running_stack(num_replicas=1) as forcing, running_stack(num_replicas=1, max_forced_tokens=0) as drawing:
        for name, members in FORMS.items():
            ratios = []
            for number in range(ROUNDS + 1):
                at_once, one_by_one = await cost(forcing, members), await cost(drawing, members)
                assert at_once[3:] == one_by_one[3:], "the texts differ"
                if number:  # the first compiles
                    ratios.append(one_by_one[0] / at_once[0])
            print(
                f"{name}: {at_once[3]} tokens, {at_once[2]} of them forced; steps {one_by_one[1]} without, {at_once[1]}"
                f" with; {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    asyncio.run(measure_saving())
