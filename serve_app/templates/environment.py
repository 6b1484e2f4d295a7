"""What a chat template finds around it: Jinja's sandbox with the usual filters and functions, and marks for its own
text.

A template is rendered twice: as it is, which gives the text, and with marks for special tokens' names in its own
constants, which gives their places. What a client sent stays as it is, so a template finds in it what it looks for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
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
    """Return JSON. Jinja's own filter writes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace holds no {name!r}")


def _raise(message: object) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message))


FIRST_MARK = 0xF0000  # a plane for private use, in which no text of the world stands
TELLING = "|｜[]<>"
"""A special token's name is known by the first of these that is in it."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Words that may stand in a special token between pieces of a template, as in `'<|' + message.role + '|>'`."""


class Marks:
    """Marks for these special tokens that stand nowhere in `besides`."""

    def __init__(self, special_names: Iterable[str], besides: str) -> None:
        self._names = frozenset(filter(None, special_names))
        self._lengths = sorted({len(name) for name in self._names}, reverse=True)
        self._firsts = _any_of({name[0] for name in self._names})
        self._telling = {next((char for char in TELLING if char in name), "") for name in self._names} - {""}
        self._tells = _any_of(self._telling)
        cuts = [(name[:at], name[at:]) for name in self._names for at in range(1, len(name))]
        self._beginnings = {one for one, _ in cuts if not self._telling.isdisjoint(one)}
        self._ends = {other for _, other in cuts if not self._telling.isdisjoint(other)}
        chars = sorted({char for name in self._names for char in name} | self._telling)
        start = FIRST_MARK
        while re.search(f"[{chr(start)}-{chr(start + 2 * len(chars))}]", besides):
            start += 2 * len(chars) + 1
        self.end = chr(start)
        self._whole = {char: chr(start + 1 + at) for at, char in enumerate(chars)}
        self._piece = {char: chr(start + 1 + len(chars) + at) for at, char in enumerate(chars)}
        self._taken = {ord(mark): char for each in (self._whole, self._piece) for char, mark in each.items()}
        self._own = re.compile(f"[{chr(start)}-{chr(start + 2 * len(chars))}]")

    def stand_in(self, text: str) -> bool:
        """Return whether the text has characters that are marks here."""
        return self._own.search(text) is not None

    def put(self, text: str) -> str:
        """Mark a template's constant: whole names, pieces of names at its ends, and telling characters."""
        marked, done = [], 0
        for start, end in self._spans(text):
            if start >= done:
                marked += [self._pieces(text[done:start]), "".join(self._whole[char] for char in text[start:end])]
                done = end
        return "".join([*marked, self._pieces(text[done:])])

    def take(self, marked: str) -> str:
        """Return the text without marks."""
        return marked.translate(self._taken)

    def foreign(self, text: str, marked: str, source: str) -> tuple[int, ...]:
        """Return the places of characters that the template did not write and that may be part of a special token.

        marked: the same text with marks;  source: all that a client sent
        """
        told = (each.start() for each in self._tells.finditer(text))
        found = {at for at in told if marked[at] == text[at]}
        whole, source = frozenset(self._whole.values()), source.lower()
        for start, end in self._spans(text):
            other = [at for at in range(start, end) if marked[at] not in whole]
            letters = "".join(text[at] for at in other if marked[at] == text[at])
            if letters and any(word not in ROLES and word in source for word in _words(letters.lower())):
                found.add(other[0])
        return tuple(sorted(found))

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the longest name at each place where one begins."""
        for found in self._firsts.finditer(text):
            start = found.start()
            for length in self._lengths:
                if (name := text[start : start + length]) in self._names:
                    yield start, start + len(name)
                    break

    def _pieces(self, text: str) -> str:
        begin, end = 0, len(text)
        for size in range(1, min(len(text), self._lengths[0] if self._lengths else 0) + 1):
            begin = size if text[:size] in self._ends else begin
            end = len(text) - size if text[-size:] in self._beginnings else end
        return "".join(
            self._piece[char] if char in self._telling or at < begin or at >= end else char
            for at, char in enumerate(text)
        )


def _words(letters: str) -> list[str]:
    return re.findall(r"[^\W_]+", letters) or [letters]


def _any_of(chars: set[str]) -> re.Pattern[str]:
    return re.compile(f"[{re.escape(''.join(sorted(chars)))}]" if chars else "(?!)")
