"""Sends bursts of known work to a running model, and notes what each took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import TYPE_CHECKING

from serve_app.cli.bench import Answer, ask
from serve_app.cli.client import Service
from serve_app.cli.screen import CommandFailed, remark

if TYPE_CHECKING:
    from serve_app.whatif.fitting import Measured
    from serve_app.whatif.trace import Asked

LEAST_ID, MOST_ID = 3, 255
"""Token ids of prompts, which every vocabulary has."""
LONG, SHORT = 1024, 32
REPLICA = "serve_app_replica_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Requests that are sent at once.

    sizes:    tokens of each one's prompt and completion
    is_known: their prompts were computed before;  adapters: different ones, in turn
    """

    sizes: tuple[tuple[int, int], ...]
    is_known: bool = False
    adapters: int = 0

    def asked(self, name: str, models: Sequence[str]) -> list[Asked]:
        """Return its requests, to these models in turn. name: of prompts that no other burst has"""
        from serve_app.whatif.trace import Asked  # imported here: only who simulates has it loaded

        return [
            Asked(at_s=0.0, output_tokens=many, pieces=((f"{name} {at}", prompt),), model=models[at % len(models)])
            for at, (prompt, many) in enumerate(self.sizes)
        ]

    def before(self, asked: Sequence[Asked], models: Sequence[str]) -> list[Asked]:
        """Return what is sent before these requests: themselves, or one to each adapter, so that all are loaded."""
        if self.is_known:
            return list(asked)
        return Burst(sizes=((SHORT, 1),) * self.adapters).asked("before", models)


MIXED = ((64, 48), (256, 16), (32, 64), (512, 8), (64, 32), (1024, 16), (128, 48), (32, 8))
"""Of a burst whose prompts are computed beside sequences that decode."""


def bursts(most: int, num_adapters: int) -> Iterator[Burst]:
    """Yield bursts that differ in each kind of work."""
    for size, prompt in ((1, 64), (1, 256), (1, LONG), (4, 256), (16, SHORT), (1, 2 * LONG)):
        yield Burst(sizes=((prompt, 1),) * min(size, most))
    yield Burst(sizes=((LONG, 1),), is_known=True)
    for size in (1, 2, 4, 8, 16, 32, 64):
        if size <= most:
            yield Burst(sizes=((SHORT, 48),) * size)
    yield Burst(sizes=((LONG, 48),) * min(4, most))
    for count in (4, 8):
        yield Burst(sizes=MIXED[:count])
        yield Burst(sizes=tuple((prompt // 2 + 8, completion) for prompt, completion in MIXED[::-1][:count]))
    for number in sorted({1, min(8, num_adapters)}) if num_adapters else ():
        yield Burst(sizes=((SHORT, 32),) * min(8, most), adapters=number)


def measure(
    service: Service, model: str, *, rounds: int, most: int, max_adapters: int
) -> tuple[list[Measured], Mapping[str, float]]:
    """Return what each burst took, the median of its rounds, and what the service tells of itself.

    A machine that stands still for a moment spoils a round, and not its burst. Raises CommandFailed, ServiceFailed.

    most: requests at once;  max_adapters: that the replica holds
    """
    from serve_app.whatif.fitting import Measured

    _told(service, model)
    every = service.models()
    longest = next((int(each.get("max_model_len") or 0) for each in every if each["id"] == model), 0) or 2 * LONG + 1
    adapters = sorted(each["id"] for each in every if each["id"].startswith(f"{model}:"))[: min(8, max_adapters)]
    wanted = [each for each in bursts(most, len(adapters)) if max(map(sum, each.sizes)) <= longest]
    asked = [each.asked(str(at), adapters[: each.adapters] or [model]) for at, each in enumerate(wanted)]
    random, seconds = Random(0), [list[float]() for _ in wanted]  # nosec B311 # prompts
    _sent(service, [_body(each, _ids(random, SHORT), 8) for each in (model, *adapters)])
    for number in range(rounds):
        remark(f"serve_app: round {number + 1} of {rounds}, {len(wanted)} bursts")
        for burst, requests, took in zip(wanted, asked, seconds, strict=True):
            bodies = [_body(each.model, _ids(random, each.input_tokens), each.output_tokens) for each in requests]
            before = burst.before(requests, adapters)
            known = bodies if burst.is_known else [_body(each.model, _ids(random, SHORT), 1) for each in before]
            if before:
                _sent(service, known)
            answers = _sent(service, bodies)
            took.append(max(each.ended_at for each in answers) - min(each.sent_at for each in answers))
    found = [
        Measured(requests, median(took), burst.before(requests, adapters))
        for burst, requests, took in zip(wanted, asked, seconds, strict=True)
    ]
    return found, _told(service, model)


def _sent(service: Service, bodies: list[dict[str, object]]) -> list[Answer]:
    """Send requests at once, and return the answers to them. Raises CommandFailed where one fails."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: ask(service, body), bodies))
    for each in answers:
        if each.error is not None:
            raise CommandFailed(each.error, each.code)
    return answers


def _ids(random: Random, number: int) -> list[int]:
    return random.choices(range(LEAST_ID, MOST_ID), k=number)  # nosec B311


def _body(model: str, ids: list[int], max_tokens: int) -> dict[str, object]:
    options = {"temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    return {"model": model, "prompt": ids, "max_tokens": max_tokens, **options}


def _told(service: Service, base: str) -> dict[str, float]:
    """Return what /metrics says of the model's replica. Raises CommandFailed where it is not one."""
    from prometheus_client.parser import text_string_to_metric_families  # imported here: only `whatif fit` needs it

    names = ("blocks", "kv_bytes", "adapter_load_seconds")
    found: dict[str, list[float]] = {name: [] for name in names}
    for family in text_string_to_metric_families(service.text("/metrics", word=REPLICA)):
        name = family.name.removeprefix(REPLICA)
        if name in found:
            found[name] += [each.value for each in family.samples if each.labels.get("model") == base]
    if len(found["blocks"]) != 1:
        must = "costs are measured of one replica: set num_replicas to 1 for as long as it takes"
        raise CommandFailed(f"{base!r} has {len(found['blocks'])} replicas, and {must}")
    num_blocks, kv_bytes, load_s = (sum(found[name]) for name in names)
    told: dict[str, float] = {"num_blocks": int(num_blocks), "block_bytes": int(kv_bytes) // max(1, int(num_blocks))}
    return told | ({"load_s": load_s} if load_s else {})
