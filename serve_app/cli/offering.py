"""Commands whose options are made of a table when they are asked for, so that nobody else waits for the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, Signature
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand

from serve_app.cli.client import Service
from serve_app.cli.screen import DEFAULT_URL, KEY_VARIABLES, URL_VARIABLE, is_watched

CLUSTER_FILE = "cluster.yaml"
URL = DEFAULT_URL
CONNECTION = "Which service"
SAID = "serve_app.said"
"""Where a context keeps what was said of a table's options, by name."""
SWITCH = ""
"""The metavar of an option that takes no value."""
UNSAID: tuple[object, ...] = (None, (), [])
"""Values of options that were not written; a list that was written empty has an empty word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One option.

    name:      by which its value is kept; with dashes it is the option
    is_switch: it takes no value, and has a negative
    is_list:   it takes every word up to the next option
    is_usual:  `--help` shows it; others are shown by `--help-all`
    """

    name: str
    about: str
    metavar: str = "TEXT"
    is_switch: bool = False
    is_list: bool = False
    is_usual: bool = True
    panel: str | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def offering(offers: Callable[[], Sequence[Offer]]) -> type[OfferingCommand]:
    """Return a kind of command with these options beside those of its function, which finds them by `said`."""
    return type("Offering", (OfferingCommand,), {"offers": staticmethod(cache(offers))})


def said(context: typer.Context) -> dict[str, Any]:
    """Return what was said of a table's options, and nothing of what was not."""
    found: dict[str, Any] = context.meta.get(SAID, {})
    return found


class OfferingCommand(TyperCommand):
    """A command of typer with options of a table."""

    offers: ClassVar[Callable[[], Sequence[Offer]]]
    _made: list[Any] | None = None

    def get_params(self, ctx: Any) -> list[Any]:
        own = super().get_params(ctx)
        if self._made is None:
            names = {each.name for each in own}  # what the command asks for itself is no option of the table
            self._made = _options([offer for offer in type(self).offers() if offer.name not in names])
        return [*own, *self._made]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = frozenset(offer.flag for offer in type(self).offers() if offer.is_list)
        return super().parse_args(ctx, _spread(args, lists))

    def invoke(self, ctx: Any) -> Any:
        names = {option.name for option in self._made or ()}
        ctx.meta[SAID] = {name: value for name, value in ctx.params.items() if name in names and value not in UNSAID}
        ctx.params = {name: value for name, value in ctx.params.items() if name not in names}
        return super().invoke(ctx)


def show_all(context: typer.Context, wanted: bool) -> None:
    """Show the help with every option of the table, for `--help-all`."""
    if not wanted:
        return
    options: list[Any] = list(context.command.get_params(context))
    for option in options:
        option.hidden = False
    print(context.get_help(), end="")
    raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option("--help-all", metavar=SWITCH, help="Show every option, and exit.", is_eager=True, callback=show_all),
]


def _options(offers: Sequence[Offer]) -> list[Any]:
    """Make options as typer makes them of a function's parameters."""

    def accept(**values: object) -> None:
        """Stands for the function that they would belong to."""

    parameters = [Parameter(each.name, Parameter.KEYWORD_ONLY, default=None, annotation=_type(each)) for each in offers]
    accept.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    accept.__annotations__ = {each.name: each.annotation for each in parameters}
    app = typer.Typer(add_completion=False)
    app.command()(accept)
    return list(typer.main.get_command(app).params)


def _type(offer: Offer) -> Any:
    name = f"{offer.flag}/--no-{offer.flag.removeprefix('--')}" if offer.is_switch else offer.flag
    kind: Any = bool if offer.is_switch else list[str] if offer.is_list else str
    metavar = SWITCH if offer.is_switch else offer.metavar
    hidden, panel = not offer.is_usual, offer.panel
    option = typer.Option(name, help=offer.about, metavar=metavar, hidden=hidden, rich_help_panel=panel)
    return Annotated[kind | None, option]


def _spread(words: Sequence[str], lists: frozenset[str]) -> list[str]:
    """Write an option that takes several words before each of them; before an empty one where there is none."""
    found: list[str] = []
    current: str | None = None
    for at, word in enumerate(words):
        if word.startswith("--"):
            current = word if word in lists else None
            is_empty = at + 1 == len(words) or words[at + 1].startswith("--")
            found += [] if current and not is_empty else [word]
            found += [""] if current and is_empty else []
        else:
            found += [word] if current is None else [current, word]
    return found


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
    str | None, typer.Option("--model", "-m", help="What answers. Without it the first model that completes texts.")
]
AsJson = Annotated[bool, typer.Option("--json", metavar=SWITCH, help="Answer in JSON, for programs.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=JSON", help="Any parameter of the service by its name; may be repeated."),
]
Stream = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream", metavar=SWITCH, help="Show text as it comes. Usually where a person looks at it."
    ),
]
Fast = Annotated[bool, typer.Option("--fast", metavar=SWITCH, help="The default now; goes with the next version.")]
ClusterFile = Annotated[str, typer.Argument(metavar="FILE", help="The cluster file.")]


def service(url: str, key: str | None, dialect: str | None = None) -> Service:
    """Return the service that these options name."""
    return Service(url=url.rstrip("/").removesuffix("/v1"), key=key, dialect=dialect)


def streams(wanted: bool | None, *, as_json: bool) -> bool:
    """Return whether text is shown as it comes: where a person looks at it, unless it was said."""
    return (is_watched() if wanted is None else wanted) and not as_json
