"""Options that several commands have, with their environment variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from serve_app.cli.names import DEFAULT_URL, KEY_VARIABLES, URL_VARIABLE
from serve_app.cli.offering import SWITCH
from serve_app.cli.screen import is_watched

if TYPE_CHECKING:
    from serve_app.cli.client import Service

CONNECTION = "Which service"

Url = Annotated[
    str,
    typer.Option("--url", envvar=URL_VARIABLE, show_envvar=True, help="Of the service.", rich_help_panel=CONNECTION),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        envvar=list(KEY_VARIABLES),
        show_envvar=True,
        help="Where the service asks for one. Others see it in the list of processes: the environment is better.",
        rich_help_panel=CONNECTION,
    ),
]
Dialect = Annotated[
    str | None,
    typer.Option("--dialect", help="Whose defaults and meanings hold: vllm, llama.cpp, …", rich_help_panel=CONNECTION),
]
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="What answers. Without it the first model that is served.")
]
AsJson = Annotated[bool, typer.Option("--json", metavar=SWITCH, help="Answer in JSON, for programs.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=JSON", help="Any parameter of the service by its name; may be repeated."),
]
Fast = Annotated[
    bool, typer.Option("--fast", metavar=SWITCH, help="The default now; goes with the next version.", hidden=True)
]
ClusterFile = Annotated[str, typer.Argument(metavar="[FILE]", help="The cluster file.")]

CLUSTER_FILE = "cluster.yaml"
URL = DEFAULT_URL


def service(url: str, key: str | None, dialect: str | None = None) -> Service:
    """What these options name."""
    from serve_app.cli.client import Service  # brings the standard library's client, which `--help` does without

    return Service(url=url.rstrip("/").removesuffix("/v1"), key=key, dialect=dialect)


def streams(wanted: bool | None, *, as_json: bool) -> bool:
    """Whether text is shown as it comes: where a person looks at it, unless it was said."""
    return (is_watched() if wanted is None else wanted) and not as_json
