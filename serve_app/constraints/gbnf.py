"""Reads GBNF, the grammars of llama.cpp and (nearly the same) xgrammar, and writes them as Lark for the library.

The library cuts a text into lexemes before it parses them, and takes the longest. So every regular part becomes one
terminal, and only recursive rules become rules. `llguidance.gbnf_to_lark` does not do that, so `"a"* b` loses texts; it
also lacks single quotes, `{,3}`, rules over several lines and limits.

root  ::= item ("," item)*      # rules by name, `root` first in meaning
item  ::= [0-9]{1,3} | 'none'   # literals in either quotes, classes, groups, repetitions
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import NoReturn, assert_never

from serve_app.constraints.limits import MOST, Refusal, check_length

MAX_NESTING = 100
MAX_COUNT_DIGITS = 9
ROOT = "root"
ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
TOKEN = re.compile(
    r"""(?P<blank>\s+|\#[^\n]*)
    |(?P<defines>::=)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<literal>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<class>\[(?:[^\]\\]|\\.)*\])
    |(?P<counts>\{\s*\d*\s*(?:,\s*\d*\s*)?\})
    |(?P<sign>[()|*+?.])""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Literal:
    text: str


@dataclass(frozen=True, slots=True)
class Class:
    """A character of the ranges, both ends included, or a character of none of them."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool


@dataclass(frozen=True, slots=True)
class Reference:
    name: str


@dataclass(frozen=True, slots=True)
class Items:
    """A sequence of parts; no parts are the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part from `low` to `high` times; `high` None is without end."""

    part: Node
    low: int
    high: int | None


Token = re.Match[str]
Node = Literal | Class | Reference | Items | Choice | Repeat
COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
ANY_CHARACTER = Class((), is_negated=True)


def read_gbnf(text: str) -> dict[str, Node]:
    """Return the rules by name, in their order. Raises Refusal, which names the line."""
    rules = _Reader(_tokens(text)).rules()
    if ROOT not in rules:
        raise Refusal(f'the grammar has no rule "{ROOT} ::= …", where a text begins')
    return rules


def _tokens(text: str) -> list[Token]:
    tokens, place = [], 0
    while found := TOKEN.match(text, place):
        tokens += [found] if found.lastgroup != "blank" else []
        place = found.end()
    if place < len(text):
        line = text.count("\n", 0, place) + 1
        raise Refusal(f"line {line}: {text[place : place + 20]!r} is not part of a grammar in GBNF")
    return tokens


class _Reader:
    """Descends along the tokens. A rule ends where the next begins, so that lines may be broken anywhere."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._place = 0
        self._nesting = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._place < len(self._tokens):
            if not self._begins_rule():
                self._refuse('expected a rule "name ::= …"')
            name = self._tokens[self._place].group()
            if name in rules:
                self._refuse(f'the rule "{name}" stands there twice')
            self._place += 2
            rules[name] = self._choice()
        return rules

    def _choice(self) -> Node:
        options = [self._items()]
        while self._takes("|"):
            options.append(self._items())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _items(self) -> Node:
        parts: list[Node] = []
        while (part := self._part()) is not None:
            while (counts := self._counts()) is not None:
                part = Repeat(part, *counts)
            parts.append(part)
        return parts[0] if len(parts) == 1 else Items(tuple(parts))

    def _part(self) -> Node | None:
        """Read the next literal, class, name or group; None if none follows."""
        token = self._peek()
        if token is None or self._begins_rule():
            return None
        match token.lastgroup:
            case "literal":
                part: Node = Literal("".join(map(chr, self._characters(token.group()))))
            case "class":
                part = self._class(token)
            case "name":
                part = Reference(token.group())
            case "sign" if token.group() == ".":
                part = ANY_CHARACTER
            case "sign" if token.group() == "(":
                return self._group()
            case _:
                return None
        self._place += 1
        return part

    def _group(self) -> Node:
        self._place += 1
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            self._refuse(f"groups are nested more than {MAX_NESTING} deep")
        inside = self._choice()
        self._nesting -= 1
        if not self._takes(")"):
            self._refuse('expected ")"')
        return inside

    def _counts(self) -> tuple[int, int | None] | None:
        token = self._peek()
        if token is None:
            return None
        text = token.group()
        if token.lastgroup == "sign" and text in COUNTS:
            self._place += 1
            return COUNTS[text]
        if token.lastgroup != "counts":
            return None
        low, comma, high = text[1:-1].replace(" ", "").partition(",")
        if max(len(low), len(high)) > MAX_COUNT_DIGITS or not (low or high):
            self._refuse(f"{text[:40]} is no number of repetitions")
        counts = int(low or 0), (int(high) if high else None) if comma else int(low)
        if counts[1] is not None and counts[1] < counts[0]:
            self._refuse(f"{text} ends below its beginning")
        self._place += 1
        return counts

    def _class(self, token: Token) -> Class:
        is_negated = token.group().startswith("[^")
        codes = self._characters(token.group(), first=2 if is_negated else 1, marks_escapes=True)
        ranges, place = [], 0
        while place < len(codes):
            low = high = abs(codes[place])
            if codes[place + 1 : place + 2] == [ord("-")] and place + 2 < len(codes):
                high = abs(codes[place + 2])
                place += 2
            if high < low:
                self._refuse(f"the class {token.group()[:40]} has a range that ends before it begins")
            ranges.append((low, high))
            place += 1
        if not ranges and not is_negated:
            self._refuse("the class [] has no character")
        return Class(tuple(ranges), is_negated=is_negated)

    def _characters(self, text: str, *, first: int = 1, marks_escapes: bool = False) -> list[int]:
        """Return the code points between quotes or brackets; escaped ones are negative if `marks_escapes`."""
        codes, place, end = [], first, len(text) - 1
        while place < end:
            if text[place] != "\\":
                codes.append(ord(text[place]))
                place += 1
                continue
            kind = text[place + 1]
            digits = text[place + 2 : min(end, place + 2 + HEX_DIGITS.get(kind, 0))]
            codes.append(self._escaped(kind, digits) * (-1 if marks_escapes else 1))
            place += 2 + len(digits)
        return codes

    def _escaped(self, kind: str, digits: str) -> int:
        if kind not in HEX_DIGITS:
            return ord(ESCAPES.get(kind, kind))
        is_number = len(digits) == HEX_DIGITS[kind] and all(digit in "0123456789abcdefABCDEF" for digit in digits)
        code = int(digits, 16) if is_number else -1
        if not 0 <= code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            self._refuse(f"\\{kind}{digits} is no character")
        return code

    def _peek(self) -> Token | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _takes(self, sign: str) -> bool:
        token = self._peek()
        if token is None or token.group() != sign:
            return False
        self._place += 1
        return True

    def _begins_rule(self) -> bool:
        following = self._tokens[self._place : self._place + 2]
        return [token.lastgroup for token in following] == ["name", "defines"]

    def _refuse(self, message: str) -> NoReturn:
        token = self._peek()
        if token is None:
            raise Refusal(f"at the end: {message}")
        line = token.string.count("\n", 0, token.start()) + 1
        raise Refusal(f"line {line}, at {token.group()[:20]!r}: {message}")


def check_rules(rules: Mapping[str, Node], order: Sequence[str]) -> None:
    """Raise Refusal if the shortest text is too long.

    order: names of rules, each behind those it is made of. Recursive rules are missing there and count by their plain
    parts.
    """
    known: dict[str, int] = {}
    circular = [name for name in rules if name not in frozenset(order)]
    for name in (*order, *reversed(circular), *reversed(circular)):
        known[name] = _shortest(rules[name], known)
    check_length(known[ROOT])


def _shortest(node: Node, known: Mapping[str, int]) -> int:
    match node:
        case Literal(text):
            return len(text)
        case Class():
            return 1
        case Reference(name):
            return known.get(name, 0)
        case Items(parts):
            return min(sum(_shortest(part, known) for part in parts), MOST)
        case Choice(options):
            return min(_shortest(option, known) for option in options)
        case Repeat(part, low, _):
            return min(_shortest(part, known) * low, MOST)
        case _:
            assert_never(node)


def to_lark(rules: Mapping[str, Node], *, prefix: str = "") -> tuple[str, list[str]]:
    """Return the symbol of the rule `root`, and the lines of Lark that define it; names begin with the prefix.

    Raises Refusal for a name that no rule has, and where the shortest text is out of reach.
    """
    return _Writer(rules, prefix).written()


def quoted(text: str) -> str:
    """Return a text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class _Writer:
    """Writes rules as Lark.

    regular: rules that can be terminals, as neither they nor what they are made of refers to itself
    """

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
        """Return an expression of rules; its regular parts become terminals of their own."""
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
        """Return the parts with regular neighbours joined."""
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
    """Return the names of the rules that an expression refers to."""
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
    """Return the names of rules that are not recursive, each behind those it refers to."""
    sorter, found = TopologicalSorter(references), list[str]()
    with suppress(CycleError):
        sorter.prepare()
    while ready := sorter.get_ready():  # those on a circle, and those that refer to one, never are
        found += ready
        sorter.done(*ready)
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
