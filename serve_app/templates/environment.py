"""What a chat template finds around it: Jinja's sandbox with the filters and functions that templates count on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment


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


def environment(keeps: Callable[[str], str]) -> ImmutableSandboxedEnvironment:
    """As transformers has it.

    keeps: gives the characters back that JSON in ASCII has written as escapes and that must stay what they are
    """

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Not Jinja's own, which writes for HTML."""
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return keeps(text) if ensure_ascii else text

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals.update(raise_exception=_raise, strftime_now=_now, namespace=Namespace)
    return made


def variables_of(members: Mapping[str, object], special_tokens: Mapping[str, str]) -> dict[str, object]:
    """What a template is given beside the conversation's own: the names of special tokens, as `bos_token`."""
    return {**special_tokens, "tools": None, "documents": None, **members}


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace holds no {name!r}")


def _raise(message: object) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)
