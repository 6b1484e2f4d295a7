"""A chat at a terminal: what lines with a slash do to it, and what is sent of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serve_app.cli.chat import Chat, commanded, talk
from serve_app.cli.client import Service
from serve_app.cli.screen import Exit
from tests.cli.served import Served

CHAT = Chat.begun("demo", system="Be kind.", parameters={"max_tokens": 2})


def test_what_was_said_is_sent_again() -> None:
    grown = CHAT.asked("one").answered("two").asked("three")
    assert grown.body() == {
        "max_tokens": 2,
        "model": "demo",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "three"},
        ],
    }


@pytest.mark.parametrize(
    ("line", "model", "roles"),
    [
        ("/model demo:pirate", "demo:pirate", ["system", "user", "assistant"]),
        ("/model", "demo", ["system", "user", "assistant"]),
        ("/reset", "demo", ["system"]),
        ("/system", "demo", []),
        ("/system Be a pirate.", "demo", ["system"]),
        ("/help", "demo", ["system", "user", "assistant"]),
        ("/history", "demo", ["system", "user", "assistant"]),
        ("/modle x", "demo", ["system", "user", "assistant"]),
    ],
)
def test_a_slash_changes_what_it_says_and_nothing_else(line: str, model: str, roles: list[str]) -> None:
    chat = commanded(CHAT.asked("one").answered("two"), line).chat
    assert chat is not None
    assert (chat.model, [each["role"] for each in chat.messages]) == (model, roles)
    assert chat.parameters == CHAT.parameters


def test_a_slip_of_the_pen_is_told_the_nearest_command() -> None:
    assert "Did you mean /model?" in commanded(CHAT, "/modle x").said


def test_it_goes_on_through_a_failure_and_ends_when_it_is_told(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: Iterator[str] = iter(["Hello", "/model demo:pirat", "Are you there?", "/model demo:pirate", "/exit", "no"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert talk(Service(url=served.url), CHAT) == Exit.DONE
    assert next(lines) == "no", "what is behind the end was not read"
    said = capsys.readouterr()
    assert 'found "pirat"' in said.err
    assert "demo:pirate answers from here on." in said.err
    assert "demo:pirat answers" not in said.err
    assert served.asked["model"] == "demo", "a name that nothing answers to was not taken"
    contents = [each["content"] for each in served.asked["messages"] if each["role"] == "user"]
    assert contents == ["Hello", "Are you there?"]
    assert len(said.out.split()) == 4
