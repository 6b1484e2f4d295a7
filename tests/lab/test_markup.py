"""Whatever a model writes is shown as text: in pages, on terminals and in figures."""

from __future__ import annotations

from html.parser import HTMLParser
from io import StringIO

import matplotlib as mpl
import pytest

from serve_app.cli.screen import visible
from serve_app.lab import markup
from serve_app.lab.completion import Comparison, Completion, Completions
from serve_app.lab.live import TerminalLive
from serve_app.lab.markup import Token

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)" x="',
    "' style='position:fixed'",
    "</span></div><iframe src='https://example.org'>",
    "&lt;b&gt; &#60;b&#62;",
    "\u202egnp.exe\u2066",
    "\x1b]0;title\x07\x1b[2J",
    "$\\frac{$",
    "javascript:alert(1)",
]
TAGS = {"div", "span", "table", "thead", "tbody", "tr", "th", "td", "progress"}
ATTRIBUTES = {"style", "title", "value", "max"}


class Reader(HTMLParser):
    """What a browser makes of a page: its elements, their attributes, its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def completion_of(text: str, *, is_chat: bool = False) -> Completion:
    call = {"id": text, "type": "function", "function": {"name": text, "arguments": text}}
    tokens = (Token(text=text, logprob=-1.0, alternatives={text: -1.0, f"{text}!": -2.0}),)
    return Completion(
        index=0, prompt=text, model=text, text=text, finish_reason=text, tokens=tokens, tool_calls=(call,),
        is_chat=is_chat,
    )  # fmt: skip


def pages_of(text: str) -> list[str]:
    """Every page that the text can be on, in every place of it."""
    one = completion_of(text)
    plain = Completion(index=0, prompt=text, model=text, text=text, finish_reason=None)
    several = Completions(choices=(one, plain), usage={"prompt_tokens": 1}, told={"ignored": text})
    table = Comparison(prompts=(text,), models=(text, "b"), completions=several)
    return [
        one._repr_html_(),
        completion_of(text, is_chat=True)._repr_html_(),
        several._repr_html_(),
        table._repr_html_(),
        markup.bar(1, 2, text),
        markup.block(text, markup.escaped(text), text),
    ]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_is_shown_as_text_and_adds_no_element(text: str) -> None:
    for page in pages_of(text):
        read = Reader(page)
        assert read.tags <= TAGS
        assert read.attributes <= ATTRIBUTES
        assert visible(text) in read.text


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_moves_nothing_on_a_terminal(text: str) -> None:
    stream = StringIO()
    shown = TerminalLive(stream)
    for end in range(1, len(text) + 1):
        shown.text("", text[:end])
    shown.end("", text)
    assert stream.getvalue() == f"{visible(text)}\n"
    assert not {"\x1b", "\x07", "\u202e", "\u2066"} & set(stream.getvalue())


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_is_no_formula_in_a_figure(text: str) -> None:
    mpl.use("agg")
    from serve_app.lab import figures

    for figure in (
        figures.heat_map({"a": completion_of(text), "b": completion_of("other")}),
        figures.distributions({"a": {text: -0.5, "b": -1.0}, "b": {text: 0.0}}),
    ):
        figure.canvas.draw()
        figures.plt.close(figure)


def test_a_token_is_the_darker_the_less_likely_it_was() -> None:
    pages = [markup.shaded([Token(text="a", logprob=logprob)]) for logprob in (0.0, -1.0, -5.0, -50.0)]
    shades = [float(page.partition("40,")[2].partition(")")[0]) for page in pages]
    assert shades == [0.0, 0.15, 0.75, 0.75]


def test_a_token_tells_what_else_might_have_been_and_how_likely() -> None:
    page = markup.shaded([Token(text="a", logprob=-1.0, alternatives={"b": -0.5, "a": -1.0})])
    assert "36.8%  &#x27;a&#x27;&#10;60.7%  &#x27;b&#x27;" in page
