"""Asks what would be with other replicas, another placement or more traffic: simulates a trace, and starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from serve_app.cli.fitting import measure
from serve_app.cli.offering import CLUSTER_FILE, SWITCH, URL, AsJson, Key, Url, service
from serve_app.cli.screen import CommandFailed, Exit, console, remark, say, say_json, table

if TYPE_CHECKING:
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
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="Where the costs are written.")] = COSTS_FILE,
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
