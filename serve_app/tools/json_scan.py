"""Follows one JSON value as it comes, character by character, and says where it ends or stops being JSON."""

from __future__ import annotations

import re
from typing import Literal

WHITESPACE = " \t\r\n"
MAX_DEPTH = 128
MAX_WORD_CHARS = 400
"""Of a number; readers refuse longer ones."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[A-Za-z0-9+.\-]+")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})')
_ESCAPE_BEGINNING = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGINNING = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][+-]?[0-9]*)?)?")
_NAMES = ("true", "false", "null")

State = Literal["open", "complete", "broken"]
_Expected = Literal["value", "value or end", "key", "key or end", "colon", "comma or end"]


class JsonScanner:
    """One value; strict, as `json.loads` is. A number that is no part of anything ends at what follows it.

    state: complete behind the last character of the value, broken before the first that cannot belong to it
    """

    def __init__(self) -> None:
        self.state: State = "open"
        self._stack: list[str] = []
        self._expected: _Expected = "value"
        self._is_in_string = False
        self._escape = ""
        self._word = ""

    def feed(self, text: str, at: int = 0) -> int:
        """Take the text from there and return the place behind what belongs to the value."""
        while at < len(text) and self.state == "open":
            if self._is_in_string:
                at = self._string(text, at)
            elif self._word or self._begins_word(text[at]):
                at = self._words(text, at)
            else:
                at += self._structure(text[at])
        return at

    def _string(self, text: str, at: int) -> int:
        """Take of a string what is there."""
        if not self._escape:
            plain = _PLAIN.match(text, at)
            at = plain.end() if plain is not None else at
            if at == len(text):
                return at
        character = text[at]
        if self._escape or character == "\\":
            self._take_escape(character)
        elif character == '"':
            self._is_in_string = False
            self._end_string()
        else:
            self.state = "broken"
        return at + (self.state != "broken")

    def _take_escape(self, character: str) -> None:
        escape = self._escape + character
        if _ESCAPE.fullmatch(escape):
            self._escape = ""
        elif _ESCAPE_BEGINNING.fullmatch(escape):
            self._escape = escape
        else:
            self.state = "broken"

    def _end_string(self) -> None:
        if self._expected in ("key", "key or end"):
            self._expected = "colon"
        else:
            self._end_value()

    def _begins_word(self, character: str) -> bool:
        return self._expected in ("value", "value or end") and (character.isalnum() or character == "-")

    def _words(self, text: str, at: int) -> int:
        """Take of a number or a name what is there; it ends before what cannot be part of it."""
        found = _WORD.match(text, at)
        if found is None:
            self._end_word()
            return at
        for character in found.group():
            if not _begins_value(self._word + character):
                self.state = "broken"
                return at
            self._word += character
            at += 1
        return at

    def _end_word(self) -> None:
        if self._word in _NAMES or _NUMBER.fullmatch(self._word):
            self._word = ""
            self._end_value()
        else:
            self.state = "broken"

    def _structure(self, character: str) -> int:
        """Take one character outside of strings and words; 0 where it cannot be taken."""
        expected = self._expected
        if character in WHITESPACE:
            return 1
        if character == '"' and expected in ("value", "value or end", "key", "key or end"):
            self._is_in_string = True
        elif character in "{[" and expected in ("value", "value or end") and len(self._stack) < MAX_DEPTH:
            self._stack.append("}" if character == "{" else "]")
            self._expected = "key or end" if character == "{" else "value or end"
        elif character == ":" and expected == "colon":
            self._expected = "value"
        elif character == "," and expected == "comma or end":
            self._expected = "key" if self._stack[-1] == "}" else "value"
        elif expected.endswith("or end") and self._stack and character == self._stack[-1]:
            self._stack.pop()
            self._end_value()
        else:
            self.state = "broken"
            return 0
        return 1

    def _end_value(self) -> None:
        self._expected = "comma or end"
        if not self._stack:
            self.state = "complete"


def _begins_value(word: str) -> bool:
    if len(word) > MAX_WORD_CHARS:
        return False
    return any(name.startswith(word) for name in _NAMES) or _NUMBER_BEGINNING.fullmatch(word) is not None
