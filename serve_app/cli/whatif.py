"""Simulates traffic on other replicas, placements or loads, and measures what steps of a running model cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from serve_app.cli.bench import Answer, drive
from serve_app.cli.client import Service
from serve_app.cli.offering import CLUSTER_FILE, SWITCH, URL, AsJson, Key, Url, service
from serve_app.cli.screen import CommandFailed, Exit, console, remark, say, say_json, table
from serve_app.cli.top import PATH, PREFIX, read_look

if TYPE_CHECKING:
    from serve_app.whatif.fitting import Measured
    from serve_app.whatif.simulation import Outcome
    from serve_app.whatif.trace import Asked

COSTS_FILE = "steps.json"
WITHIN = 0.15
"""A simulation is believed that differs from what was recorded by no more."""
HEADS = ("policy", "replicas", "tokens/s", "refused", "p50", "p99", "prefixes", "adapters", "balance")
Cluster = Annotated[str, typer.Option("--cluster", metavar="FILE", help="The cluster file.")]
OfFile = Annotated[str | None, typer.Option("--model", "-m", help="Of the cluster file; usually its first.")]
Costs = Annotated[str, typer.Option("--steps", metavar="FILE", help="What steps cost, as `whatif fit` wrote it.")]


def run(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="JSON lines, CSV, or the router's log.")],
    cluster: Cluster = CLUSTER_FILE,
    steps: Costs = COSTS_FILE,
    model: OfFile = None,
    replicas: Annotated[
        str | None, typer.Option("--replicas", metavar="1,2,4", help="How many. Usually as in the file.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="warm,random", help="Placements. Usually as in the file.")
    ] = None,
    speed: Annotated[float, typer.Option("--speed", min=0.001, help="Requests come so many times as fast.")] = 1.0,
    find_replicas: Annotated[
        float | None,
        typer.Option("--find-replicas", metavar="SECONDS", help="The fewest whose p99 of first tokens is no longer."),
    ] = None,
    back_test: Annotated[
        bool, typer.Option("--back-test", metavar=SWITCH, help="Compare with what the trace says was measured.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Simulate a trace with these replicas and placements, on a virtual clock; nothing is started or computed."""
    from serve_app.whatif.cluster import read_cluster  # imported here: they bring torch and Ray, which takes time
    from serve_app.whatif.costs import StepCosts
    from serve_app.whatif.simulation import enough_replicas, policies_of, recorded, simulate
    from serve_app.whatif.trace import Unusable, read_trace

    try:
        served = read_cluster(cluster, StepCosts.read(steps), model=model)
        counts = _counts(replicas) or [served.num_replicas]
        asked = _of_model(read_trace(trace), served.config.name, speed=speed)
        found = [recorded(asked)] if back_test else []
        for each in policies_of(policy or "") or [served.policy]:
            if find_replicas is None:
                found += [simulate(asked, served, num_replicas=count, policy=each) for count in counts]
            else:
                found.append(enough_replicas(asked, served, policy=each, target_p99_s=find_replicas))
    except Unusable as error:
        raise CommandFailed(str(error), Exit.MISUSED) from None
    if as_json:
        say_json([asdict(each) for each in found])
    else:
        console().print(table(HEADS, map(_row, found), texts=1))
    return _judge(*found[:2], tell=remark if as_json else say) if back_test else Exit.DONE


def fit(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where the costs are written.")] = COSTS_FILE,
    cluster: Cluster = CLUSTER_FILE,
    model: OfFile = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="So often each burst is sent.")] = 3,
    url: Url = URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Measure what steps of a running model cost, with one replica and nobody else asking."""
    from serve_app.whatif.cluster import read_cluster  # imported here: they bring torch and Ray, which takes time
    from serve_app.whatif.fitting import FIRST_GUESS, fit_costs
    from serve_app.whatif.trace import Unusable

    try:
        config = read_cluster(cluster, FIRST_GUESS, model=model).config
        most, slots = config.max_num_sequences, config.max_adapters
        measured, told = measure(service(url, key), config.name, rounds=rounds, most=most, max_adapters=slots)
        costs = fit_costs(measured, config, told)
    except Unusable as error:
        raise CommandFailed(str(error)) from None
    costs.write(file)
    if as_json:
        say_json({"costs": asdict(costs), "bursts": [each.told for each in measured]})
    else:
        say(f"{file}: a step takes {1000 * costs.steps:.3g} ms, and {1000 * costs.rows:.3g} for each row;")
        say(f"a token of a prompt {1000 * costs.prompt_tokens:.3g} ms; mean error of the bursts {costs.error:.1%}")
    return Exit.DONE


def _counts(text: str | None) -> list[int]:
    """Raises CommandFailed for what is no number of replicas."""
    words = (text or "").replace(",", " ").split()
    if wrong := [word for word in words if not (word.isdecimal() and int(word))]:
        raise CommandFailed(f"--replicas must be numbers above 0, as 1,2,4; found {wrong[0]!r}", Exit.MISUSED)
    return [int(word) for word in words]


def _of_model(trace: Iterable[Asked], name: str, *, speed: float) -> list[Asked]:
    """Return the requests to that model. Raises Unusable where there are none."""
    from serve_app.whatif.trace import Unusable

    every = list(trace)
    found = [replace(each, at_s=each.at_s / speed) for each in every if each.base in ("", name)]
    if not found:
        raise Unusable(f"the trace has no request to {name!r}; --model names another model of the cluster file")
    if len(found) < len(every):
        remark(f"serve_app: {len(every) - len(found)} requests to other models are left out")
    return found


def _judge(was: Outcome, told: Outcome, *, tell: Callable[[str], None]) -> int:
    """Say how far a simulation is from what was recorded."""
    pairs = {
        "tokens/s": (was.tokens_per_s, told.tokens_per_s),
        "first p50": (was.first_p50, told.first_p50),
        "first p99": (was.first_p99, told.first_p99),
    }
    off = {name: (b or 0.0) / a - 1 for name, (a, b) in pairs.items() if a}
    tell("simulated beside recorded: " + ", ".join(f"{name} {part:+.1%}" for name, part in off.items()))
    return Exit.DONE if all(abs(part) <= WITHIN for part in off.values()) else Exit.FAILED


def _row(found: Outcome) -> Sequence[str]:
    return (
        found.policy,
        str(found.num_replicas or "–"),
        f"{found.tokens_per_s:.1f}",
        str(found.num_refused),
        _seconds(found.first_p50),
        _seconds(found.first_p99),
        _part(found.prefix_hits),
        _part(found.adapter_hits),
        "–" if found.balance is None else f"{found.balance:.2f}",
    )


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _part(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


LEAST_ID, MOST_ID = 3, 255
"""Token ids of prompts, which every vocabulary has."""
LONG, SHORT = 1024, 32
REPLICA = "replica_"


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
    answers = drive(service, iter(bodies), num_clients=len(bodies), told=lambda: None)
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
    look = read_look(service.text(PATH, word=PREFIX + REPLICA), 0.0)
    if (num_replicas := len(look.values(f"{REPLICA}blocks", model=base))) != 1:
        must = "costs are measured of one replica: set num_replicas to 1 for as long as it takes"
        raise CommandFailed(f"{base!r} has {num_replicas} replicas, and {must}")
    num_blocks, load_s = (look.value(REPLICA + name, model=base) for name in ("blocks", "adapter_load_seconds"))
    kv_bytes = look.value(f"{REPLICA}kv_bytes", model=base, state="budget")
    told: dict[str, float] = {"num_blocks": int(num_blocks), "block_bytes": int(kv_bytes) // max(1, int(num_blocks))}
    return told | ({"load_s": load_s} if load_s else {})
