"""Talks with a model at a terminal, or answers one message."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from urllib.parse import quote

from serve_app.cli.client import Service, ServiceFailed
from serve_app.cli.conversing import Chat, commanded
from serve_app.cli.exits import Exit
from serve_app.cli.screen import remark, say, say_json, whole_lines, write

PATH = "/v1/chat/completions"
PROMPT = ">>> "


def answer_once(service: Service, chat: Chat, text: str, *, streams: bool, as_json: bool) -> int:
    """Answer one message and end. Raises ServiceFailed."""
    asked = chat.asked(text)
    if streams:
        with whole_lines():
            for piece in _pieces(service, asked):
                write(piece)
        return Exit.DONE
    answer = service.json(PATH, asked.body(), member="choices")
    if as_json:
        say_json(answer)
    else:
        say(answer["choices"][0]["message"].get("content") or "")
    return Exit.DONE


def talk(service: Service, chat: Chat) -> int:
    """Go on until a person ends it; a failure ends one answer, and Ctrl-C what is being written."""
    _edit_lines()
    remark(f"{chat.model} at {service.url}. /help lists commands; Ctrl-D ends.")
    current: Chat | None = chat
    while current is not None:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            break
        except KeyboardInterrupt:
            say()
            continue
        if line:
            current = _turned(service, current, line)
    say()
    return Exit.DONE


def _turned(service: Service, chat: Chat, line: str) -> Chat | None:
    """The chat behind this line; None where it ended."""
    if line.startswith("/"):
        turn = commanded(chat, line)
        if turn.chat is not None and turn.chat.model != chat.model:
            try:
                service.json(f"/v1/models/{quote(turn.chat.model, safe='')}", member="id")
            except ServiceFailed as failure:
                remark(f"serve_app: {failure}")
                return chat
        if turn.said:
            remark(turn.said)
        return turn.chat
    return _answered(service, chat, line)


def _answered(service: Service, chat: Chat, text: str) -> Chat:
    """With the message and its answer; without either where nothing came."""
    asked, answer = chat.asked(text), ""
    try:
        with contextlib.closing(_pieces(service, asked)) as pieces:
            for piece in pieces:
                write(piece)
                answer += piece
    except KeyboardInterrupt:
        remark("\n(stopped)")
    except ServiceFailed as failure:
        remark(f"serve_app: {failure}")
    else:
        say()
    return asked.answered(answer) if answer else chat


def _pieces(service: Service, chat: Chat) -> Generator[str]:
    """What the model says, as it comes; calls of tools as it writes them."""
    with contextlib.closing(service.events(PATH, chat.body())) as events:
        for event in events:
            for choice in event["choices"][:1]:
                delta = choice.get("delta") or {}
                yield delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    function = call.get("function") or {}
                    yield (function.get("name") or "") + (function.get("arguments") or "")


def _edit_lines() -> None:
    """Arrows and former lines at the prompt, where Python has readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
