"""Commands that measure and watch a running service."""

from __future__ import annotations

from typing import Annotated

import typer

from serve_app.cli.offering import SWITCH
from serve_app.cli.options import URL, AsJson, Dialect, Key, Model, Set, Url, service

RUNNING = "running"


def bench(
    target: Annotated[str, typer.Argument(metavar="[URL|running]", help="The service that is asked.")] = RUNNING,
    model: Model = None,
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
    from serve_app.cli.bench import bench_service
    from serve_app.cli.load import Load
    from serve_app.cli.parameters import parameters_of

    load = Load(
        num_clients=clients,
        num_requests=requests,
        max_tokens=max_tokens,
        num_words=prompt_words,
        parameters=parameters_of({}, set_ or (), kind="CompletionRequest"),
    )
    address = url if target == RUNNING else target
    return bench_service(service(address, key, dialect), model, load, as_json=as_json)


def top(
    interval: Annotated[float, typer.Option("--interval", "-i", min=0.2, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", metavar=SWITCH, help="Look twice, show that, and end.")] = False,
    url: Url = URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Watch replicas, queues, tokens per second, caches and tenants as they are now."""
    from serve_app.cli.top import watch_service

    return watch_service(service(url, key), interval_s=interval, is_once=once, as_json=as_json)
