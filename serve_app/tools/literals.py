"""Reads one literal as a model writes it, and rewrites it as JSON while it arrives; finds marks in a growing text.

JSON is kept to the letter. Rewritten are Python's names and quotes, keys without quotes, a comma before a closing
bracket, line breaks within a string, keyword arguments in parentheses, and the quotes of Gemma.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Literal

WHITESPACE = " \t\r\n"
MAX_DEPTH = 128
MAX_WORD_CHARS = 400
"""Of a number or a name; JSON readers refuse longer numbers."""
VERBATIM = ('<|"|>', "<escape>")
"""Quotes between which nothing is escaped."""
QUOTES = (*VERBATIM, '"""', "'''", '"', "'")
KEY_QUOTES = (*VERBATIM, '"', "'")
NAMES: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
BRACKETS: Mapping[str, tuple[str, str, str]] = {"{": ("}", "{", "}"), "[": ("]", "[", "]"), "(": (")", "[", "]")}
"""For each that opens: what closes it, and both as JSON has them."""
KEYWORDS = (")", "{", "}")

_SPACE = re.compile(r"[ \t\r\n]+")
_UP_TO_QUOTE = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_UP_TO_VERBATIM = re.compile(r"[^<]*")
_WORD = re.compile(r"[\w+.\-]+")
_ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|U(?:000[0-9A-Fa-f]|0010)[0-9A-Fa-f]{4}|.)", re.DOTALL)
_ESCAPE_BEGINNING = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3}|x[0-9A-Fa-f]?|U[0-9A-Fa-f]{0,7})?\Z")
_JSON_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})')
_PYTHON_ESCAPES = {"'": "'", "\n": "", "a": "\a", "v": "\v", "0": "\0"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_FLOAT = re.compile(r"-?(?:[0-9]+\.|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

State = Literal["open", "complete", "broken"]
_Expected = Literal["value", "value or end", "key", "key or end", "colon", "comma or end"]


class LiteralReader:
    """One literal.

    state:   complete behind the last character of the literal, broken before the first that cannot belong to it
    is_call: the literal is the keyword arguments of a call, in parentheses
    """

    def __init__(self, *, is_call: bool = False) -> None:
        self.state: State = "open"
        self._is_call = is_call
        self._written: list[str] = []
        self._stack: list[tuple[str, str, str]] = []
        self._expected: _Expected = "value"
        self._quote = ""
        self._comma = ""  # with the white space behind it, until it is known whether something follows

    def feed(self, text: str, at: int = 0, *, is_last: bool = False) -> int:
        """Read the text from there. Return the place behind what was read; the rest has to come again, with more."""
        before = -1
        while at < len(text) and self.state == "open" and at != before:
            before = at
            at = self._string(text, at, is_last) if self._quote else self._outside(text, at, is_last)
        return at

    def take(self) -> str:
        """Return what was rewritten since the last call."""
        taken, self._written = "".join(self._written), []
        return taken

    def close(self) -> bool:
        """Close the brackets of a text that has ended between two values, and return whether the literal is whole."""
        if self.state == "open" and self._expected.endswith("or end") and not self._quote:
            self._written += [json_closer for _, _, json_closer in reversed(self._stack)]
            self.state = "complete"
        return self.state == "complete"

    def _string(self, text: str, at: int, is_last: bool) -> int:
        quote = self._quote
        if text.startswith(quote, at):
            self._written.append('"')
            self._quote = ""
            self._end_string()
            return at + len(quote)
        if not is_last and quote.startswith(text[at:]):
            return at
        if text[at] == "\\" and quote not in VERBATIM:
            return self._escape(text, at, is_last)
        run = (_UP_TO_VERBATIM if quote in VERBATIM else _UP_TO_QUOTE[quote[0]]).match(text, at + 1)
        assert run is not None
        self._written.append(_escaped(text[at : run.end()]))
        return run.end()

    def _escape(self, text: str, at: int, is_last: bool) -> int:
        if not is_last and _ESCAPE_BEGINNING.match(text, at):
            return at
        found = _ESCAPE.match(text, at)
        escape = "\\" if found is None else found.group()
        if _JSON_ESCAPE.fullmatch(escape):
            self._written.append(escape)
        elif len(escape) > 2:
            self._written.append(_escaped(chr(int(escape[2:], 16))))
        else:
            self._written.append(_escaped(_PYTHON_ESCAPES.get(escape[1:], escape)))
        return at + len(escape)

    def _end_string(self) -> None:
        if self._expected in ("key", "key or end"):
            self._expected = "colon"
        else:
            self._end_value()

    def _outside(self, text: str, at: int, is_last: bool) -> int:
        """Read one token; nothing is read where more of the text has to come."""
        space = _SPACE.match(text, at)
        if space is not None:
            if self._comma:
                self._comma += space.group()
            else:
                self._written.append(space.group())
            return space.end()
        if self._expected in ("colon", "comma or end"):
            return at + self._structure(text[at])
        if self._expected.endswith("or end") and self._stack and text[at] == self._stack[-1][0]:
            return at + self._structure(text[at])
        return self._begun(text, at, is_last)

    def _structure(self, character: str) -> int:
        """Read one character between values; 0 where it cannot be read."""
        is_key = bool(self._stack) and self._stack[-1][1] == "{"
        if self._expected == "colon" and character == ("=" if self._stack[-1] is KEYWORDS else ":"):
            self._written.append(":" if character == ":" else ": ")
            self._expected = "value"
        elif self._expected == "comma or end" and character == ",":
            self._comma = ","
            self._expected = "key or end" if is_key else "value or end"
        elif self._expected.endswith("or end") and self._stack and character == self._stack[-1][0]:
            self._written += [self._comma[1:], self._stack.pop()[2]]
            self._comma = ""
            self._end_value()
        else:
            self.state = "broken"
            return 0
        return 1

    def _begun(self, text: str, at: int, is_last: bool) -> int:
        """Read a bracket, a quote, or a word."""
        is_key = self._expected in ("key", "key or end")
        rest = text[at : at + len(VERBATIM[1])]
        quotes = KEY_QUOTES if is_key else QUOTES
        if not is_last and any(len(rest) < len(quote) and quote.startswith(rest) for quote in quotes):
            return at
        quote = next(filter(rest.startswith, quotes), "")
        word = None if quote else _WORD.match(text, at)
        if word is not None:
            return self._word(text, word, is_last, is_key=is_key)
        if quote:
            self._quote = quote
            self._write('"')
            return at + len(quote)
        if not is_key and text[at] in BRACKETS and len(self._stack) < MAX_DEPTH:
            return at + self._open(text[at])
        self.state = "broken"
        return at

    def _open(self, character: str) -> int:
        bracket = KEYWORDS if self._is_call and not self._stack else BRACKETS[character]
        self._stack.append(bracket)
        self._write(bracket[1])
        self._expected = "key or end" if bracket[1] == "{" else "value or end"
        return 1

    def _word(self, text: str, found: re.Match[str], is_last: bool, *, is_key: bool) -> int:
        if found.end() == len(text) and not is_last and found.end() - found.start() <= MAX_WORD_CHARS:
            return found.start()
        written = json.dumps(found.group(), ensure_ascii=False) if is_key else _json_of_word(found.group())
        if written is None or len(written) > MAX_WORD_CHARS:
            self.state = "broken"
            return found.start()
        self._write(written)
        self._end_string()
        return found.end()

    def _write(self, token: str) -> None:
        self._written += [self._comma, token]
        self._comma = ""

    def _end_value(self) -> None:
        self._expected = "comma or end"
        if not self._stack:
            self.state = "complete"


def as_json(text: str) -> str | None:
    """Return the literal that the text is, as JSON; None if it is none."""
    reader = LiteralReader()
    end = reader.feed(text, is_last=True)
    return reader.take().strip(WHITESPACE) if reader.state == "complete" and not text[end:].strip(WHITESPACE) else None


def _json_of_word(word: str) -> str | None:
    """Return a number or a name as JSON; None if it is neither."""
    if word in NAMES or word in NAMES.values():
        return NAMES.get(word, word)
    if _FLOAT.fullmatch(word):
        return repr(float(word))
    return word if _NUMBER.fullmatch(word) else None


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class MarkFinder:
    """Of marks that begin at the same place, the longest counts."""

    def __init__(self, marks: Iterable[str]) -> None:
        longest_first = sorted({mark for mark in marks if mark}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = frozenset(mark[:size] for mark in longest_first for size in range(1, len(mark)))
        firsts = "".join({mark[0] for mark in longest_first})
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")
        self._longest = max(map(len, longest_first), default=0)

    def find(self, text: str, *, is_last: bool = False) -> tuple[int, str]:
        """Return the place of the first mark, and that mark; "" where what stands there may still become one.

        Without either, the place is the text's end. is_last: the text does not grow any more
        """
        found = self._pattern.search(text)
        held = len(text) if is_last else len(text) - self._num_held(text)
        if found is not None and (found.start() < held or is_last):
            return found.start(), found.group()
        return held, ""

    def may_begin(self, text: str) -> bool:
        """Return whether a mark begins the text, or may do so when more text comes."""
        return not text or text in self._beginnings or self._pattern.match(text) is not None

    def _num_held(self, text: str) -> int:
        """Return how many last characters may be the beginning of a mark."""
        at = max(0, len(text) - self._longest + 1)
        while (found := self._first.search(text, at)) is not None:
            if text[found.start() :] in self._beginnings:
                return len(text) - found.start()
            at = found.end()
        return 0
