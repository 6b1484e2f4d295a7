"""Answers a file of requests, by a service or by a model in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serve_app.cli.offering import URL, AsJson, Dialect, HelpAll, Key, Model, Set, Url, service
from serve_app.cli.parameters import parameters_of
from serve_app.cli.screen import CommandFailed, Exit, progress, remark, say, say_json

if TYPE_CHECKING:
    from serve_app.cli.client import Service
    from serve_app.core.batches import Answered
    from serve_app.offline.files import Form, Question
    from serve_app.offline.run import Ask

    Opened = AbstractContextManager[Ask]

MAX_ERRORS = 3
"""Kinds of errors that are told in words."""
GOES_ON = "The same command goes on where this one ended."
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Where answers go: JSON lines, or .parquet. Usually FILE's name with .answers."
    ),
]
Local = Annotated[
    str | None,
    typer.Option("--local", metavar="MODEL", help="Computes here: a model's folder, builtin:demo, or a cluster file."),
]


def run(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Lines as OpenAI's, or rows with a prompt: JSON lines, or .parquet.")],
    output: Output = None,
    model: Model = None,
    local: Local = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, max=1024, help="Requests at once.")] = 64,
    set_: Set = None,
    url: Url = URL,
    key: Key = None,
    dialect: Dialect = None,
    as_json: AsJson = False,
    help_all: HelpAll = False,
) -> int:
    """Answer every request of a file, in its order; a run that was ended goes on where it was."""
    from serve_app.core.errors import ServeError, Unavailable
    from serve_app.offline.files import Form  # imported here: it brings pydantic

    parameters = parameters_of(context, set_, kind="CompletionRequest")
    output = output or file.with_name(f"{file.stem}.answers{file.suffix}")
    try:
        default, opened = _served(service(url, key, dialect)) if local is None else _loaded(local, model, dialect)
        form = Form(default=default, model=model, parameters=parameters)
        total, errors = _answer(file, output, form, opened, num_threads=concurrency)
    except ServeError as error:
        goes_on, code = (f" {GOES_ON}", Exit.SERVICE_FAILED) if isinstance(error, Unavailable) else ("", Exit.FAILED)
        raise CommandFailed(f"{error}{goes_on}", code) from error
    except KeyboardInterrupt:
        remark(f"serve_app: {GOES_ON}")
        raise
    num_failed = errors.total()
    if as_json:
        say_json({"output": str(output), "answered": total - num_failed, "failed": num_failed, "errors": errors})
    else:
        say(f"{output}: {total - num_failed} of {total} requests were answered.")
    for text, count in errors.most_common(MAX_ERRORS):
        remark(f"serve_app: {count} × {text}")
    return Exit.FAILED if errors else Exit.DONE


def _answer(file: Path, output: Path, form: Form, opened: Opened, *, num_threads: int) -> tuple[int, Counter[str]]:
    """Write all answers; return how many requests there are, and how often each error occurred.

    The file is read to its end before a model is loaded or a request is sent.
    """
    from serve_app.offline.files import PARQUET, columns_of, questions, schema_of, write_answers
    from serve_app.offline.run import Journal, ask_all

    part = output.with_name(f"{output.name}.part")
    if output.exists() and not part.exists():
        raise CommandFailed(f"{output} is there already: move it away, or name another --output.", Exit.MISUSED)
    schema = schema_of(file) if output.suffix == PARQUET else None
    unsent = [each.unsent for each in questions(file, form)]
    if names := sorted({*chain.from_iterable(unsent)}):
        remark(f"serve_app: columns that are no parameters are not sent: {', '.join(names)}.")
    journal, errors, is_done = Journal(part), Counter[str](), False

    def answers() -> Iterator[tuple[Any, dict[str, Any]]]:
        for question in questions(file, form):
            line = journal.line(question)
            if (error := columns_of(line)["error"]) is not None:
                errors[str(error)] += 1
            yield question, line

    try:
        with opened as ask, progress(len(unsent)) as told:
            ask_all(questions(file, form), ask, journal, num_threads=num_threads, told=told)
        write_answers(answers(), output, schema)
        is_done = not errors
    finally:
        journal.close(is_done=is_done)
    return len(unsent), errors


def _served(service: Service) -> tuple[str, Opened]:
    """Return the first model of a service, and what asks the service."""

    def ask(question: Question, request_id: str) -> Answered:
        return replace(service, request_id=request_id).answered(question.path, question.body)

    return service.default_model(None), nullcontext(ask)


def _loaded(local: str, model: str | None, dialect: str | None) -> tuple[str, Opened]:
    """Return the name of a model, and what loads it and asks it."""
    args = {**_args_of(local, model), **({"dialect": dialect} if dialect else {})}

    @contextmanager
    def opened() -> Iterator[Ask]:
        from serve_app.catalog.files import CatalogError
        from serve_app.offline.model import LocalModel  # imported here: it brings torch

        try:
            loaded = LocalModel(args)
        except (CatalogError, ValueError) as error:
            raise CommandFailed(f"--local {local}: {error}") from error
        with closing(loaded):
            yield loaded.ask

    return str(args["name"]), opened()


def _args_of(local: str, model: str | None) -> dict[str, Any]:
    """Return the `args` of a model: those of a cluster file, or none but its folder."""
    if not Path(local).is_file():
        return {"name": Path(local.rpartition(":")[2]).resolve().name, "path": local}
    from serve_app.cli.address import args_of, read_cluster_file  # imported here: it brings yaml

    models = {each["name"]: dict(each) for each in args_of(read_cluster_file(Path(local))) if "name" in each}
    name = next(iter(models), "") if model is None else model.partition(":")[0]
    if name not in models:
        raise CommandFailed(f"--local: {local} has no model {name!r}; it has {', '.join(models) or 'none'}")
    return models[name]
