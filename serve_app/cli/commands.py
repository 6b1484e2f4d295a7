"""The commands as typer reads them: options, help, and which function carries each out (imported when it runs)."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from serve_app.cli.offering import (
    CLUSTER_FILE,
    SWITCH,
    URL,
    AsJson,
    ClusterFile,
    Dialect,
    Fast,
    HelpAll,
    Key,
    Model,
    Set,
    Url,
    said,
    service,
    streams,
)
from serve_app.cli.screen import Exit, say, say_json

if TYPE_CHECKING:
    from serve_app.check.cluster_file import Report

Stream = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream", metavar=SWITCH, help="Show text as it comes. Usually where a person looks at it."
    ),
]
Models = Annotated[str | None, typer.Option("--models", "-m", help="Separated by commas. Usually all that are served.")]
System = Annotated[str | None, typer.Option("--system", "-s", help="The message that says what the model is to be.")]


def complete(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="What is completed; - and a pipe are read.")] = None,
    model: Model = None,
    stream: Stream = None,
    set_: Set = None,
    url: Url = URL,
    key: Key = None,
    dialect: Dialect = None,
    as_json: AsJson = False,
    help_all: HelpAll = False,
) -> int:
    """Complete a prompt, with any parameter of the service."""
    from serve_app.cli.complete import complete_prompt, read_prompt
    from serve_app.cli.parameters import parameters_of

    parameters = parameters_of(said(context), set_ or (), kind="CompletionRequest")
    asked = service(url, key, dialect)
    wants_stream = streams(stream, as_json=as_json)
    return complete_prompt(asked, read_prompt(prompt), model, parameters, streams=wants_stream, as_json=as_json)


def chat(
    context: typer.Context,
    message: Annotated[str | None, typer.Argument(help="One message, answered at once; a pipe is read.")] = None,
    model: Model = None,
    system: System = None,
    stream: Stream = None,
    set_: Set = None,
    url: Url = URL,
    key: Key = None,
    dialect: Dialect = None,
    as_json: AsJson = False,
    help_all: HelpAll = False,
) -> int:
    """Talk with a model; with a message, or a pipe, answer that alone."""
    from serve_app.cli.chat import Chat, answer_once, talk
    from serve_app.cli.complete import read_message
    from serve_app.cli.parameters import parameters_of

    asked = service(url, key, dialect)
    parameters = parameters_of(said(context), set_ or (), kind="ChatRequest")
    begun = Chat.begun(asked.default_model(model), system=system, parameters=parameters)
    text = read_message(message)
    if text is None:
        return talk(asked, begun)
    return answer_once(asked, begun, text, streams=streams(stream, as_json=as_json), as_json=as_json)


def compare(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="What each of them completes; - and a pipe are read.")] = None,
    models: Models = None,
    set_: Set = None,
    url: Url = URL,
    key: Key = None,
    dialect: Dialect = None,
    as_json: AsJson = False,
    help_all: HelpAll = False,
) -> int:
    """Complete a prompt by several models or adapters, side by side."""
    from serve_app.cli.complete import compare_models, read_prompt
    from serve_app.cli.parameters import parameters_of

    parameters = parameters_of(said(context), set_ or (), kind="CompletionRequest")
    names = None if models is None else tuple(filter(None, models.split(",")))
    return compare_models(service(url, key, dialect), read_prompt(prompt), names, parameters, as_json=as_json)


def explain(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="Of the request; - and a pipe are read.")] = None,
    model: Model = None,
    is_chat: Annotated[bool, typer.Option("--chat", metavar=SWITCH, help="The prompt is a message of a chat.")] = False,
    set_: Set = None,
    url: Url = URL,
    key: Key = None,
    dialect: Dialect = None,
    as_json: AsJson = False,
    help_all: HelpAll = False,
) -> int:
    """Say what a request would do: its tokens, models, defaults, limits and cost. Nothing runs."""
    from serve_app.cli.complete import explain_request, read_prompt
    from serve_app.cli.parameters import parameters_of

    kind = "ChatRequest" if is_chat else "CompletionRequest"
    parameters = parameters_of(said(context), set_ or (), kind=kind)
    return explain_request(
        service(url, key, dialect), read_prompt(prompt), model, parameters, is_chat=is_chat, as_json=as_json
    )


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""As in the args of an application."""
Folder = Annotated[str, typer.Argument(metavar="PATH", help="A folder on this machine.")]


def models(context: typer.Context, url: Url = URL, key: Key = None, as_json: AsJson = False) -> int:
    """List what a running service answers to, or check a model's folder."""
    if context.invoked_subcommand is not None:
        return 0
    from serve_app.cli.listing import list_models

    return list_models(service(url, key), as_json=as_json)


def check_model(
    path: Folder,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="That its weights would be loaded in.")] = "auto",
    as_json: AsJson = False,
) -> int:
    """Say whether a model's folder can be served, and what it takes of memory; loads nothing."""
    from serve_app.cli.listing import check_model_path

    return check_model_path(path, dtype=dtype, as_json=as_json)


def list_adapters(
    model: Annotated[str | None, typer.Option("--model", "-m", help="Of this base. Usually of all.")] = None,
    url: Url = URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """List the adapters that a running service has."""
    from serve_app.cli.listing import list_adapters as listed

    return listed(service(url, key), model, as_json=as_json)


def check_adapter(
    path: Folder,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Folder of the base that it is for.")] = None,
    as_json: AsJson = False,
) -> int:
    """Say whether an adapter's folder, or a folder of adapters, can be served; loads nothing."""
    from serve_app.cli.listing import check_adapter_path

    return check_adapter_path(path, model, as_json=as_json)


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
    from serve_app.cli.bench import Load, bench_service
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


ENVIRONMENT = "A cluster that you start yourself wants the environment that `serve_app env` prints; `up` sets it."
Log = Annotated[
    str | None, typer.Option("--log", metavar="FILE", help="Where Ray's own lines go; - is here. Usually a file, told.")
]
Port = Annotated[
    int | None,
    typer.Option("--port", min=1, max=65_535, help="In the place of the file's http_options.port."),
]
Dashboard = Annotated[
    bool,
    typer.Option("--dashboard", metavar=SWITCH, help="Ray's dashboard too, on port 8265, for `serve deploy`."),
]


def up(
    file: ClusterFile = CLUSTER_FILE,
    fast: Fast = False,
    port: Port = None,
    dashboard: Dashboard = False,
    log: Log = None,
    as_json: AsJson = False,
) -> int:
    """Start a local cluster and serve a cluster file until Ctrl-C."""
    from serve_app.check.cluster_file import check_file  # imports Ray, which takes its time
    from serve_app.cli.up import serve_until_interrupted

    _say_of_fast(fast)
    report = check_file(file, environment=os.environ)
    if not as_json:
        say("\n".join(report.lines))
    elif not report.is_sound:
        _say_report(file, report)
    if not report.is_sound:
        return Exit.FAILED
    return serve_until_interrupted(file, port=port, has_dashboard=dashboard, log=log, as_json=as_json)


def down(
    file: ClusterFile = CLUSTER_FILE,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65_535, help="Of its run on this port alone.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """End what `up` of that file has started from this checkout, and nothing else."""
    from serve_app.cli.down import end_cluster

    return end_cluster(file, port=port, as_json=as_json)


def check(file: ClusterFile = CLUSTER_FILE, fast: Fast = False, as_json: AsJson = False) -> int:
    """Validate a cluster file; starts nothing."""
    from serve_app.check.cluster_file import check_file
    from serve_app.cli.up import notes_on_port

    _say_of_fast(fast)
    report = check_file(file, environment=os.environ, notes=notes_on_port(file))
    if as_json:
        _say_report(file, report)
    else:
        say("\n".join([*report.lines, ENVIRONMENT]))
    return Exit.DONE if report.is_sound else Exit.FAILED


def doctor(
    file: ClusterFile = CLUSTER_FILE,
    url: Annotated[
        str | None, typer.Option("--url", help="Where clients reach it, as behind TLS. Usually as in the file.")
    ] = None,
    fast: Fast = False,
    as_json: AsJson = False,
) -> int:
    """Look at what a running service lets in, and say how to mend it."""
    from serve_app.cli.doctor.report import run  # imports Ray, which takes its time

    _say_of_fast(fast)
    return run(file, url=url, as_json=as_json)


def env(fast: Fast = False, as_json: AsJson = False) -> int:
    """Print the environment that a cluster of your own wants, as shell lines."""
    from serve_app.check.haproxy import is_behind_haproxy
    from serve_app.cli.environment import cluster_settings, shell_lines

    _say_of_fast(fast)
    has_haproxy = is_behind_haproxy({}, os.environ)
    if as_json:
        say_json([asdict(each) for each in cluster_settings(os.environ, has_haproxy=has_haproxy)])
    else:
        say("\n".join(shell_lines(os.environ, has_haproxy=has_haproxy)))
    return Exit.DONE


def _say_of_fast(fast: bool) -> None:
    if fast:
        print("serve_app: --fast is the default now, and goes with the next version", file=sys.stderr)


def _say_report(file: str, report: Report) -> None:
    say_json({"file": file, "is_sound": report.is_sound, "lines": list(report.lines)})
