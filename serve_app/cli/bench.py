"""Puts load on a service and reports what it was worth."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from random import Random
from typing import Annotated

import typer

from serve_app.cli.client import Service, ServiceFailed
from serve_app.cli.offering import URL, AsJson, Dialect, Key, Model, Set, Url, service
from serve_app.cli.parameters import parameters_of
from serve_app.cli.screen import CommandFailed, Exit, console, progress, remark, say_json, table
from serve_app.offline.run import in_threads

PATH = "/v1/completions"
RUNNING = "running"
WORDS = (
    "the old owl looks at a small boat on its way over quiet water while morning light falls through tall trees",
    "and somebody far away sings of rain bread stars a red door two brave mice and winter",
)
ROUNDING = 1e-9
"""By which a product of floats may be too large."""
TURNS = 8
"""Of each of two models that are compared, at most; in each every client has something to ask."""
MAX_ERRORS = 3
"""Kinds of errors that are told in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Seconds: half of all took no longer than p50, 95 of 100 no longer than p95; None where there were none."""

    p50: float | None
    p95: float | None
    max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a load came to. first_token_s: from sending to the first text;  gap_s: between one text and the next"""

    model: str
    num_clients: int
    num_answered: int
    num_failed: int
    seconds: float
    requests_per_s: float
    output_tokens: int
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    first_token_s: Spread
    gap_s: Spread
    request_s: Spread
    errors: dict[str, int]


def bench(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="URL|running", help="The service that is asked.")] = RUNNING,
    model: Model = None,
    beside: Annotated[str | None, typer.Option("--beside", help="Another model, asked the same in turn.")] = None,
    clients: Annotated[int, typer.Option("--clients", "-c", min=1, max=1024, help="At once, each asking anew.")] = 4,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="In all.")] = 32,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Of each completion.")] = 64,
    prompt_words: Annotated[int, typer.Option("--prompt-words", min=1, help="Of each prompt; no two are alike.")] = 32,
    set_: Set = None,
    url: Url = URL,
    key: Key = None,
    dialect: Dialect = None,
    as_json: AsJson = False,
) -> int:
    """Put load on a service, and report what it was worth."""
    load = Load(
        num_clients=clients,
        num_requests=requests,
        max_tokens=max_tokens,
        num_words=prompt_words,
        parameters=parameters_of(context, set_, kind="CompletionRequest"),
    )
    asked = service(url if target == RUNNING else target, key, dialect)
    names = [asked.default_model(model), *filter(None, [beside])]
    if len({*names}) < len(names):
        found = f"--beside has to name another model than the one it stands beside, and both are {names[0]!r}"
        raise CommandFailed(f"{found}. `serve_app models` lists what is served", Exit.MISUSED)
    for name in names:
        warming = ask(asked, {**next(load.bodies(name)), "max_tokens": 1})
        if warming.error is not None:
            raise CommandFailed(warming.error, warming.code)
    with progress(load.num_requests * len(names)) as told:
        measured = in_turns(asked, load, names, told=told)
    reports = [
        report(answers, model=name, num_clients=clients, seconds=seconds)
        for name, (answers, seconds) in zip(names, measured, strict=True)
    ]
    if as_json:
        say_json(asdict(reports[0]) if beside is None else {"models": [asdict(each) for each in reports]})
    elif beside is None:
        _show(*reports)
    else:
        _show_beside(*reports)
    return Exit.SERVICE_FAILED if any(each.num_failed for each in reports) else Exit.DONE


def in_turns(
    service: Service, load: Load, models: Sequence[str], *, told: Callable[[], object]
) -> list[tuple[list[Answer], float]]:
    """Return what each model answered to the whole load, and the seconds that it took.

    Only one model has requests at a time. A turn of each follows a turn of each in the opposite order, so that a
    machine that becomes slower does so for both.
    """
    bodies = [load.bodies(model) for model in models]
    answers: list[list[Answer]] = [[] for _ in models]
    seconds, order = [0.0 for _ in models], [*range(len(models))]
    turn = load.num_requests if len(models) == 1 else max(load.num_clients, math.ceil(load.num_requests / TURNS))
    for _ in range(0, load.num_requests, turn):
        for at in order:
            started = time.perf_counter()
            answers[at] += drive(service, islice(bodies[at], turn), num_clients=load.num_clients, told=told)
            seconds[at] += time.perf_counter() - started
        order.reverse()
    return list(zip(answers, seconds, strict=True))


def report(answers: Sequence[Answer], *, model: str, num_clients: int, seconds: float) -> Report:
    """Return what the answers came to. One that failed counts as failed, and in no time."""
    good = [each for each in answers if each.error is None]
    tokens = sum(each.output_tokens for each in good)
    return Report(
        model=model,
        num_clients=num_clients,
        num_answered=len(good),
        num_failed=len(answers) - len(good),
        seconds=seconds,
        requests_per_s=len(good) / seconds,
        output_tokens=tokens,
        output_tokens_per_s=tokens / seconds,
        prompt_tokens=sum(each.prompt_tokens for each in good),
        cached_tokens=sum(each.cached_tokens for each in good),
        first_token_s=_spread([each.seen_at[0] - each.sent_at for each in good if each.seen_at]),
        gap_s=_spread([gap for each in good for gap in each.gaps]),
        request_s=_spread([each.ended_at - each.sent_at for each in good]),
        errors=dict(Counter(each.error for each in answers if each.error is not None)),
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(p50=quantile(values, 0.5), p95=quantile(values, 0.95), max=max(values, default=None))


def _show(found: Report) -> None:
    terminal = console()
    failed = f", {found.num_failed} failed" if found.num_failed else ""
    terminal.print(
        f"{found.model}: {found.num_answered} requests by {found.num_clients} clients in {found.seconds:.1f} s{failed}"
    )
    terminal.print(
        f"{found.output_tokens_per_s:.1f} tokens/s, {found.requests_per_s:.2f} requests/s;"
        f" {found.prompt_tokens} tokens of prompts, {found.cached_tokens} of them cached"
    )
    terminal.print()
    spreads = {
        "to the first token": found.first_token_s,
        "between two pieces": found.gap_s,
        "whole request": found.request_s,
    }
    rows = [(name, *map(_milliseconds, (each.p50, each.p95, each.max))) for name, each in spreads.items()]
    terminal.print(table(("milliseconds", "p50", "p95", "longest"), rows, texts=1))
    for error, count in Counter(found.errors).most_common(MAX_ERRORS):
        remark(f"serve_app: {count} × {error}")


def _show_beside(one: Report, other: Report) -> None:
    _show(one)
    console().print()
    _show(other)
    if one.output_tokens and other.output_tokens:
        times = one.output_tokens_per_s / other.output_tokens_per_s
        console().print(f"\n{one.model} gave {times:.2f} times the tokens per second of {other.model}")


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.1f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """num_clients: at once;  num_requests: in all;  num_words: of each prompt;  parameters: of each request besides"""

    num_clients: int
    num_requests: int
    max_tokens: int
    num_words: int
    parameters: Mapping[str, object] = field(default_factory=dict)

    def bodies(self, model: str) -> Iterator[dict[str, object]]:
        """Yield requests whose prompts begin differently, the same ones every time; each runs to its full length."""
        random, words = Random(self.num_requests), " ".join(WORDS).split()  # nosec B311 # prompts
        for number in range(self.num_requests):
            prompt = " ".join([f"{number}:", *random.choices(words, k=self.num_words)])  # nosec B311
            asked = {"model": model, "prompt": prompt, "max_tokens": self.max_tokens, "seed": number}
            usual = {"ignore_eos": True, **self.parameters}
            yield {**asked, **usual, "stream_options": {"include_usage": True}}


@dataclass(slots=True, kw_only=True)
class Answer:
    """What became of one request. Times are seconds on one clock. seen_at: when each event with text came

    error: None where there was none; otherwise a command would end with `code`
    """

    sent_at: float
    ended_at: float = 0.0
    seen_at: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    code: Exit = Exit.SERVICE_FAILED

    @property
    def gaps(self) -> list[float]:
        """Seconds between one event with text and the next."""
        return [after - before for before, after in zip(self.seen_at, self.seen_at[1:], strict=False)]


def drive(
    service: Service, bodies: Iterator[dict[str, object]], *, num_clients: int, told: Callable[[], object]
) -> list[Answer]:
    """Send all requests by so many threads, and return an answer of each, errors among them."""
    answers: list[Answer] = []

    def work(body: dict[str, object]) -> None:
        answers.append(ask(service, body))
        told()

    in_threads(bodies, work, num_threads=num_clients)
    return answers


def ask(service: Service, body: Mapping[str, object]) -> Answer:
    """Send one request. What the service does wrong is in the answer and raises nothing."""
    answer = Answer(sent_at=time.perf_counter())
    try:
        for event in service.events(PATH, body):
            if any(choice["text"] for choice in event["choices"]):
                answer.seen_at.append(time.perf_counter())
            if usage := event.get("usage"):
                answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    except ServiceFailed as failure:
        answer.error, answer.code = str(failure), failure.code
    answer.ended_at = time.perf_counter()
    return answer


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the least value that so many of all are not above (nearest rank); None of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - ROUNDING) - 1)] if ordered else None
