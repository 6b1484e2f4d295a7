"""What a chat template finds around it: Jinja's sandbox with the filters and functions that templates count on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.optimizer import optimize
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serve_app.templates.messages import is_string

SEARCHES = re.compile(
    "count|get|(starts|ends)with|r?(find|index|partition|split)|[lr]?strip|trim|remove(pre|suf)fix|replace"
    "|(select|reject)(attr)?"
)
"""Methods and filters that look for their arguments in a text; `replace` and `get` for the first one alone."""


class GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}`, which marks answers for training: here what is between is only written."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Namespace(jinja2.utils.Namespace):
    """`namespace()` without names that begin with an underscore, by which Python's own could be reached."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def environment(now: Callable[[], datetime] = datetime.now) -> ImmutableSandboxedEnvironment:
    """Return the sandbox as transformers has it.

    now: the time that a template writes
    """

    def strftime_now(form: str) -> str:
        return now().strftime(form)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.tests["string"] = is_string
    made.globals.update(raise_exception=_raise, strftime_now=strftime_now, namespace=Namespace)
    return made


def compiled(
    source: str, around: ImmutableSandboxedEnvironment, mark: Callable[[str], str] | None = None
) -> jinja2.Template:
    """Compile a template.

    mark: applied to each text that the template itself may write, and to none that it looks for
    """
    if mark is None:
        return around.from_string(source)
    tree = optimize(around.parse(source), around)  # joins what is constant
    assert isinstance(tree, jinja2.nodes.Template)
    _mark_written(tree, mark)
    return around.from_string(tree)


def variables_of(members: Mapping[str, object], special_tokens: Mapping[str, str]) -> dict[str, object]:
    """What a template is given beside the conversation's own: the names of special tokens, as `bos_token`."""
    return {**special_tokens, "tools": None, "documents": None, **members}


def _mark_written(node: jinja2.nodes.Node, mark: Callable[[str], str]) -> None:
    written: list[jinja2.nodes.Node]
    match node:
        case jinja2.nodes.TemplateData():
            node.data = mark(node.data)
            return
        case jinja2.nodes.Const():
            node.value = mark(node.value) if isinstance(node.value, str) else node.value
            return
        case jinja2.nodes.Compare() | jinja2.nodes.Test():
            return
        case jinja2.nodes.Getitem():
            written = [node.node]
        case jinja2.nodes.Pair():
            written = [node.value]
        case jinja2.nodes.Call(node=jinja2.nodes.Getattr(attr=name)) if SEARCHES.fullmatch(name):
            written = [node.node, *(node.args[1:] if name in ("replace", "get") else ())]
        case jinja2.nodes.Filter(name=name, node=jinja2.nodes.Node() as filtered) if SEARCHES.fullmatch(name):
            written = [filtered, *(node.args[1:] if name == "replace" else ())]
        case _:
            written = list(node.iter_child_nodes())
    for each in written:
        _mark_written(each, mark)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not Jinja's own, which writes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace holds no {name!r}")


def _raise(message: object) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message))
