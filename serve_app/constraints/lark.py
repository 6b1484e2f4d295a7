"""Writes grammars as the library reads them, in its form of Lark.

The library cuts a text into lexemes before it parses them, and takes the longest lexeme it can. So whatever is regular
is written as one terminal, within which nothing is lost by that; only what refers to itself becomes rules.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import assert_never

from serve_app.constraints.gbnf import ROOT, Choice, Class, Items, Literal, Node, Reference, Repeat
from serve_app.constraints.reach import check_rules
from serve_app.constraints.refusal import Refusal


def to_lark(rules: Mapping[str, Node], *, prefix: str = "") -> tuple[str, list[str]]:
    """The symbol of the rule `root`, and lines of Lark that define it; names begin with the prefix.

    Raises Refusal for a name that no rule has, and where the shortest text is out of reach.
    """
    return _Writer(rules, prefix).written()


def quoted(text: str) -> str:
    """A literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class _Writer:
    """regular: rules that can be terminals, as neither they nor what they are made of refers to itself"""

    def __init__(self, rules: Mapping[str, Node], prefix: str) -> None:
        self._rules = rules
        self._references = {name: _references(node) for name, node in rules.items()}
        for name, references in self._references.items():
            for other in references:
                if other not in rules:
                    raise Refusal(f'the rule "{name}" names "{other[:60]}", which is no rule of the grammar')
        order = _regular(self._references)
        check_rules(rules, order)
        self._regular = frozenset(order)
        self._symbols = {
            name: f"{prefix.upper()}T{at}" if name in self._regular else f"{prefix.lower()}r{at}"
            for at, name in enumerate(rules)
        }
        self._prefix = prefix
        self._lines: list[str] = []
        self._num_hoisted = 0

    def written(self) -> tuple[str, list[str]]:
        for name, node in self._rules.items():
            body = self._terminal(node) if name in self._regular else self._rule(node)
            self._lines.append(f"{self._symbols[name]}: {body}")
        return self._symbols[ROOT], self._lines

    def _is_regular(self, node: Node) -> bool:
        return _references(node) <= self._regular

    def _rule(self, node: Node) -> str:
        """An expression of rules, whose regular parts are terminals of their own."""
        if self._is_regular(node):
            return self._hoisted(node)
        match node:
            case Reference(name):
                return self._symbols[name]
            case Items(parts):
                return " ".join(map(self._rule, self._joined(parts)))
            case Choice(options):
                return "(" + " | ".join(map(self._rule, options)) + ")"
            case Repeat(part, low, high):
                return f"({self._rule(part)}){_counted(low, high)}"
            case Literal() | Class():
                raise AssertionError("is regular")
            case _:
                assert_never(node)

    def _joined(self, parts: tuple[Node, ...]) -> list[Node]:
        """Neighbours that are regular, joined."""
        joined: list[Node] = []
        run: list[Node] = []
        for part in parts:
            if self._is_regular(part):
                run.append(part)
                continue
            joined += [Items(tuple(run))] if run else []
            joined.append(part)
            run = []
        return joined + ([Items(tuple(run))] if run else [])

    def _hoisted(self, node: Node) -> str:
        self._num_hoisted += 1
        symbol = f"{self._prefix.upper()}H{self._num_hoisted}"
        self._lines.append(f"{symbol}: {self._terminal(node)}")
        return symbol

    def _terminal(self, node: Node) -> str:
        match node:
            case Literal(text):
                return quoted(text)
            case Class(ranges, is_negated):
                return _class(ranges, is_negated=is_negated)
            case Reference(name):
                return self._symbols[name]
            case Items(parts):
                return "(" + " ".join(map(self._terminal, parts)) + ")" if parts else '""'
            case Choice(options):
                return "(" + " | ".join(map(self._terminal, options)) + ")"
            case Repeat(part, low, high):
                return f"({self._terminal(part)}){_counted(low, high)}"
            case _:
                assert_never(node)


def _references(node: Node) -> frozenset[str]:
    """The names of the rules that an expression is made of."""
    match node:
        case Reference(name):
            return frozenset((name,))
        case Items(parts):
            return frozenset().union(*map(_references, parts))
        case Choice(options):
            return frozenset().union(*map(_references, options))
        case Repeat(part, _, _):
            return _references(part)
        case Literal() | Class():
            return frozenset()
        case _:
            assert_never(node)


def _regular(references: Mapping[str, frozenset[str]]) -> list[str]:
    """Names from which no chain of references leads back, each behind those that it refers to."""
    users = defaultdict(list)
    num_open = {name: len(others) for name, others in references.items()}
    for name, others in references.items():
        for other in others:
            users[other].append(name)
    found = [name for name, count in num_open.items() if not count]
    for name in found:
        for user in users[name]:
            num_open[user] -= 1
            if not num_open[user]:
                found.append(user)
    return found


def _class(ranges: tuple[tuple[int, int], ...], *, is_negated: bool) -> str:
    if not ranges:
        return "/(?s:.)/"
    inside = "".join(_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}" for low, high in ranges)
    return f"/[{'^' if is_negated else ''}{inside}]/"


def _escaped(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\u{{{code:x}}}"


def _counted(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"
