"""Commands that ask a running service for texts."""

from __future__ import annotations

from typing import Annotated

import typer

from serve_app.cli.offering import SWITCH, HelpAll, said
from serve_app.cli.options import URL, AsJson, Dialect, Key, Model, Set, Url, service, streams

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
    from serve_app.cli.complete import complete_prompt
    from serve_app.cli.parameters import parameters_of
    from serve_app.cli.prompts import read_prompt

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
    from serve_app.cli.chat import answer_once, talk
    from serve_app.cli.conversing import Chat
    from serve_app.cli.parameters import parameters_of
    from serve_app.cli.prompts import read_message

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
    from serve_app.cli.compare import compare_models
    from serve_app.cli.parameters import parameters_of
    from serve_app.cli.prompts import read_prompt

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
    from serve_app.cli.explain import explain_request
    from serve_app.cli.parameters import parameters_of
    from serve_app.cli.prompts import read_prompt

    kind = "ChatRequest" if is_chat else "CompletionRequest"
    parameters = parameters_of(said(context), set_ or (), kind=kind)
    return explain_request(
        service(url, key, dialect), read_prompt(prompt), model, parameters, is_chat=is_chat, as_json=as_json
    )
