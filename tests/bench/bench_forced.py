"""Measures what appending forced tokens at once saves, and what hostile constraints cost others.

    python -m tests.bench.bench_forced

The embedded model writes records of a schema, the same ones with and without, in runs that take turns: prints tokens,
those that were forced, steps, and the median of the ratio of the times. Then a zoo of hostile constraints is sent, one
after another, while a stream without any constraint goes on: prints what each is answered, after how long, and how long
a step takes meanwhile, beside the same stream alone.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Any

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
LONG = "ab, " * 60_000
HOSTILE: dict[str, dict[str, Any]] = {
    "a regex of 240 000 characters": {"regex": "(ab|c)*" * 34_000},
    "nested counts": {"regex": "((a{1000}){1000}){1000}"},
    "10^9 items": {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
    "100 patterns at once": {"json_schema": {"allOf": [{"pattern": f"^(a|b)*{'[ab]' * at}$"} for at in range(100)]}},
    "a constant of 240 000 characters": {"json_schema": {"const": LONG}},
    "the same behind a choice": {
        "json_schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"const": LONG}}}
    },
    "a grammar of 10^9 letters": {"grammar": "root ::= x{1000}\nx ::= y{1000}\ny ::= z{1000}\nz ::= 'ab'"},
    "a grammar that doubles": {
        "grammar": "\n".join(["root ::= r0", *(f"r{at} ::= r{at + 1} r{at + 1}" for at in range(60)), "r60 ::= 'a'"])
    },
    "left recursion": {"grammar": "root ::= root root | root | 'a' | ''"},
    "10 000 rules": {
        "grammar": "\n".join(["root ::= r0", *(f"r{at} ::= 'a' | r{at + 1}" for at in range(9999)), "r9999 ::= 'b'"])
    },
    "nested 60 deep": {"json_schema": json.loads('{"items": ' * 28 + "{}" + "}" * 28)},
    "references in a circle": {
        "json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    },
    "40 000 options": {"json_schema": {"enum": [f"{at:x}" * 3 for at in range(16_000)]}},
    "ambiguity": {"grammar": "root ::= (a | b | c)*\na ::= 'x'*\nb ::= 'x'*\nc ::= 'x' a b"},
}  # fmt: skip


def body(**members: Any) -> dict[str, Any]:
    prompts = [f"Record {number}:" for number in range(4)]
    return {"model": "demo", "prompt": prompts, "seed": 7, "max_tokens": 160, "return_token_ids": True, **members}


async def cost(stack: Stack, members: dict[str, Any]) -> tuple[float, int, int, int, list[str]]:
    """Seconds, steps, forced tokens, tokens, texts."""
    engine = stack.services[0].engine
    before = engine.num_steps, engine.num_forced_tokens
    started = time.perf_counter()
    answer = (await stack.post(body(**members))).json()
    seconds = time.perf_counter() - started
    await stack.settled()
    texts = [choice["text"] for choice in answer["choices"]]
    steps, forced = engine.num_steps - before[0], engine.num_forced_tokens - before[1]
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


async def measure_zoo() -> None:
    async with running_stack(num_replicas=1) as stack:
        engine = stack.services[0].engine
        await stack.services[0].warm()
        stream = asyncio.create_task(endless(stack))
        await asyncio.sleep(2)
        alone = await step_ms(engine, asyncio.sleep(3))
        print(f"a step of the stream alone: {alone:.1f} ms", flush=True)
        for name, members in HOSTILE.items():
            sent = {"model": "demo", "prompt": "x", "max_tokens": 8, **members}
            started = time.perf_counter()
            answers: list[Any] = []
            during = await step_ms(engine, collect(stack, sent, answers))
            seconds = time.perf_counter() - started
            said = answers[0].json().get("error", {}).get("message", "")[-90:]
            print(f"{name}: {answers[0].status_code} after {seconds:.2f} s, a step {during:.1f} ms; {said}", flush=True)
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)


async def endless(stack: Stack) -> None:
    while True:
        await stack.post({"model": "demo", "prompt": "Once", "max_tokens": 900, "ignore_eos": True})


async def collect(stack: Stack, sent: dict[str, Any], answers: list[Any]) -> None:
    answers.append(await stack.post(sent))


async def step_ms(engine: Any, work: Any) -> float:
    """Milliseconds of a step, on the average while the work is done."""
    before = engine.step_s, engine.num_steps
    await work
    return (engine.step_s - before[0]) / max(1, engine.num_steps - before[1]) * 1e3


async def main() -> None:
    await measure_saving()
    await measure_zoo()


if __name__ == "__main__":
    asyncio.run(main())
