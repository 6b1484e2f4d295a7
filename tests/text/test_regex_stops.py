"""Regular expressions as stops: against Python's own `re`, whatever the split, in bounded time."""

from __future__ import annotations

import random
import re
import warnings
from dataclasses import dataclass

import pytest

from serve_app.core.errors import InvalidRequest
from serve_app.text.regex_stops import FREE_STEPS, RegexStopMatcher, check_regexes, program_of
from serve_app.text.regex_syntax import BadRegex

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Cut:
    """What a text comes to: shown, the expression that matched, and what it matched."""

    shown: str
    matched: str | None
    matched_text: str


def slow_cut(sources: tuple[str, ...], pieces: list[str]) -> Cut:
    """The law written out: the first end of a match anywhere, then its earliest beginning, then the first named.

    What needs no next character is complete at once. Where a piece ends, so is what asks for the end of the text. What
    has to see the next character is complete only with it, after the others.
    """
    text = "".join(pieces)
    ends = {len("".join(pieces[: count + 1])) for count in range(len(pieces))}
    for end in range(1, len(text) + 1):
        for group, seen in (("", text), (ENDS, text[:end] if end in ends else ""), ((*ENDS, *BORDERS), text)):
            for begin in range(end):
                for source in sources:
                    is_meant = source.endswith(group) if group else not source.endswith((*ENDS, *BORDERS))
                    if is_meant and seen and _spans(source, seen, begin, end):
                        return Cut(text[:begin], source, text[begin:end])
    return Cut(text, None, "")


def _spans(source: str, text: str, begin: int, end: int) -> bool:
    """Is there a match of exactly these characters, seen where they stand?"""
    flags, body = re.fullmatch(r"(\(\?\w+\))?(.*)", source, re.DOTALL).groups(default="")
    if "m" not in flags:
        body = body.replace("$", r"\Z")  # Python's also stands before a last line break
    rest = rf"(?=[\s\S]{{{len(text) - end}}}\Z)"
    return re.compile(f"{flags}(?:{body}){rest}").match(text, begin) is not None


def fast_cut(sources: tuple[str, ...], pieces: list[str]) -> Cut:
    matcher = RegexStopMatcher(sources)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    shown += matcher.flush()
    return Cut(shown, matcher.matched, matcher.matched_text)


def random_pieces(text: str, draw: random.Random) -> list[str]:
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 5)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


ENDS = ("$", r"\Z")
BORDERS = (r"\b", r"\B")
ATOMS = ["a", "b", "c", ".", "[ab]", "[^a]", r"\d", r"\w", "(?:ab|c)", "(b|ca)", "1", r"\s", "(?:ab?)"]


def random_source(draw: random.Random) -> str:
    parts = []
    for _ in range(draw.randint(1, 4)):
        repetition = draw.choice(["", "", "", "*", "+", "?", "{2}", "{1,2}", "*?", "{2,}"])
        parts.append(draw.choice(ATOMS) + repetition)
    source = "".join(parts)
    if draw.random() < 0.3:
        source += "|" + draw.choice(ATOMS) + draw.choice(ATOMS)
    elif draw.random() < 0.3:
        source += draw.choice([r"\b", r"\B", "$", r"\Z"])
    elif draw.random() < 0.2:
        source = draw.choice(["^", r"\b", r"\A"]) + source + "c"
    return draw.choice(["", "", "(?i)", "(?s)", "(?m)"]) + source


@pytest.mark.parametrize("seed", range(20))
def test_any_text_is_cut_where_the_law_written_out_cuts_it(seed):
    draw = random.Random(seed)
    num_tried = 0
    while num_tried < 50:
        sources = tuple(random_source(draw) for _ in range(draw.randint(1, 3)))
        try:
            program_of(sources)
        except BadRegex:  # matches the empty text
            continue
        num_tried += 1
        text = "".join(draw.choices("abcAB1 \n_", k=draw.randint(0, 24)))
        pieces = random_pieces(text, draw)
        assert fast_cut(sources, pieces) == slow_cut(sources, pieces), (sources, pieces)


@pytest.mark.parametrize(
    ("sources", "pieces", "expected"),
    [
        ((r"\d{3}",), ["call 12", "3 now"], Cut("call ", r"\d{3}", "123")),
        ((r"\n\n+",), ["one\n", "two\n", "\nthree"], Cut("one\ntwo", r"\n\n+", "\n\n")),
        ((r"<a>.*</a>",), ["x <a>b", "c</", "a> y"], Cut("x ", r"<a>.*</a>", "<a>bc</a>")),
        (("END\\b",), ["the ENDING, the END", ", more"], Cut("the ENDING, the ", "END\\b", "END")),
        (("(?i)stop$",), ["stop it. Stop"], Cut("stop it. ", "(?i)stop$", "Stop")),
        ((r"[.!?]\s*$",), ["Pi is 3.14", ". ", "More"], Cut("Pi is 3.14", r"[.!?]\s*$", ". ")),
        ((r"[.!?]\s*\Z",), ["One", ".", " Two"], Cut("One", r"[.!?]\s*\Z", ".")),
        ((r"[.!?]\s*$",), ["3.14 and", "", " on"], Cut("3.14 and on", None, "")),
        (("bc", "abcd"), ["xabcd"], Cut("xa", "bc", "bc")),  # complete first
        (("b.", "abc"), ["xabc"], Cut("x", "abc", "abc")),  # complete together: began earlier
        (("[a-c]+z", "cz"), ["abcz"], Cut("", "[a-c]+z", "abcz")),
        (("q",), ["nothing here"], Cut("nothing here", None, "")),
        ((), ["anything"], Cut("anything", None, "")),
    ],
)
def test_a_text_ends_where_the_first_match_is_complete(sources, pieces, expected):
    assert fast_cut(sources, pieces) == expected


def test_what_cannot_be_a_match_any_more_is_shown_at_once():
    matcher = RegexStopMatcher((r"<[a-z]+>",))
    assert matcher.feed("a < b <ta") == "a < b "
    assert matcher.feed("g!") == "<tag!"
    assert matcher.feed("<x") == ""
    assert matcher.feed(">") == ""
    assert matcher.matched == r"<[a-z]+>"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("(", "not closed"),
        (")", "not opened"),
        ("[a", "set is not closed"),
        ("*a", "nothing to repeat"),
        ("a**", "repetition is repeated"),
        ("a*+", "possessive"),
        (r"(a)\1", "no escape"),
        ("(?=a)", "looking ahead"),
        ("a(?i)b", "flags inside"),
        ("(?<!a)b", "looking ahead or behind"),
        ("a{2,1}", "highest count is below"),
        ("a{5000}", "more than 1000"),
        ("(?:a{100}){100}", "at most 128 characters"),
        ("|".join(f"[{chr(1000 + i)}-{chr(1001 + i)}]" for i in range(65)), "at most 64 different sets"),
        ("a*", "empty text"),
        ("$", "empty text"),
        (r"\b", "empty text"),
        ("", "empty text"),
        ("[b-a]", "bad character range"),
        ("[a--b]", "two dashes"),
        ("(" * 60 + "a" + ")" * 60, "nested more than 50"),
        ("(?x)a", "flag 'x'"),
        ("\\", "no escape"),
    ],
)
def test_an_expression_that_is_not_supported_is_refused_by_name(source, complaint):
    with pytest.raises(InvalidRequest) as caught:
        check_regexes((source,))
    assert caught.value.param == "stop_regex"
    assert '"stop_regex" must ' in caught.value.message
    assert complaint in caught.value.message


ODD = ["[[a]b", "[a&&b]", "[a||b]", "[]a]", "[^]a]", r"[\]\b]", "a{", "{a}", "x]", "[\\w.-]"]


@pytest.mark.parametrize("source", ODD)
def test_odd_characters_mean_what_they_mean_to_python(source):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = re.compile(source)
    for text in ("[b", "&b", "|", "]", "x]", "a{", "a{,}", "{a}", "ab", "\\", "-", "\b", "^"):
        matcher = RegexStopMatcher((source,))
        matcher.feed(text)
        assert (matcher.matched is not None) is (expected.search(text) is not None), text


@pytest.mark.parametrize("source", [r"(a+)+b", r"(a|a)*b", r"(?:a?){120}b", r"(.*)(.*)(.*)x", r"(\w+\s?)+!"])
def test_the_work_per_character_is_bounded_where_a_backtracking_engine_hangs(source):
    matcher = RegexStopMatcher((source,))
    shown = "".join(matcher.feed("a") for _ in range(300))
    assert shown + matcher.flush() == "a" * 300


def test_what_is_held_is_looked_through_twice_at_most_for_each_character():
    """Of each character the last 100 may still become a match; all are shown that cannot, and not one too early."""
    matcher, shown = RegexStopMatcher((r"[ab].{100}q",)), ""
    text = "".join(random.Random(5).choices("abcdef", k=3000))
    steps = 0
    for at, character in enumerate(text):
        before = matcher._num_steps
        shown += matcher.feed(character)
        steps += before + 2 - matcher._num_steps
        possible = next((place for place in range(max(0, at - 100), at + 1) if text[place] in "ab"), at + 1)
        assert possible - 220 <= len(shown) <= possible
        assert steps <= 2 * (at + 1) + FREE_STEPS
    assert shown + matcher.flush() == text
