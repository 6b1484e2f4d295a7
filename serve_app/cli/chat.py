"""Talks with a model at a terminal, or answers one message."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Annotated
from urllib.parse import quote

import typer

from serve_app.cli.client import Service, ServiceFailed
from serve_app.cli.complete import read_message
from serve_app.cli.offering import URL, AsJson, Dialect, HelpAll, Key, Model, Set, Stream, Url, service, streams
from serve_app.cli.parameters import parameters_of
from serve_app.cli.screen import Exit, remark, say, say_json, whole_lines, write

PATH = "/v1/chat/completions"
PROMPT = ">>> "
Message = Mapping[str, str]

COMMANDS: Mapping[str, str] = {
    "/help": "this list",
    "/model NAME": "go on with another model; without a name, the one that answers",
    "/system TEXT": "say what the model is to be, and begin anew; without a text, no such message",
    "/reset": "forget all that was said",
    "/history": "everything that was said",
    "/exit": "end; Ctrl-D does, too",
}


def chat(
    context: typer.Context,
    message: Annotated[str | None, typer.Argument(help="One message, answered at once; a pipe is read.")] = None,
    model: Model = None,
    system: Annotated[
        str | None, typer.Option("--system", "-s", help="The message that says what the model is to be.")
    ] = None,
    stream: Stream = None,
    set_: Set = None,
    url: Url = URL,
    key: Key = None,
    dialect: Dialect = None,
    as_json: AsJson = False,
    help_all: HelpAll = False,
) -> int:
    """Talk with a model; with a message, or a pipe, answer that alone."""
    asked = service(url, key, dialect)
    parameters = parameters_of(context, set_, kind="ChatRequest")
    begun = Chat.begun(asked.default_model(model), system=system, parameters=parameters)
    text = read_message(message)
    if text is None:
        return talk(asked, begun)
    sent = begun.asked(text)
    if streams(stream, as_json=as_json):
        with whole_lines():
            for piece in _pieces(asked, sent):
                write(piece)
        return Exit.DONE
    answer = asked.json(PATH, sent.body(), member="choices")
    if as_json:
        say_json(answer)
    else:
        say(answer["choices"][0]["message"].get("content") or "")
    return Exit.DONE


def talk(service: Service, chat: Chat) -> int:
    """Talk until a person ends it. A failure ends one answer; Ctrl-C ends what is being written."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - arrows and former lines at the prompt
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
    """Return the chat after this line; None where the line ended it."""
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
    """Return the chat with the message and its answer; without either where nothing came."""
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
    """Yield what the model says as it comes, and calls of tools as it writes them."""
    with contextlib.closing(service.events(PATH, chat.body())) as events:
        for event in events:
            for choice in event["choices"][:1]:
                delta = choice.get("delta") or {}
                yield delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    function = call.get("function") or {}
                    yield (function.get("name") or "") + (function.get("arguments") or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """model, parameters: of every request;  messages: what was said so far, a system's first"""

    model: str
    messages: tuple[Message, ...] = ()
    parameters: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def begun(cls, model: str, *, system: str | None, parameters: Mapping[str, object]) -> Chat:
        messages = () if system is None else ({"role": "system", "content": system},)
        return cls(model=model, messages=messages, parameters=parameters)

    @property
    def system(self) -> tuple[Message, ...]:
        """What the model was told to be, where it was."""
        return tuple(each for each in self.messages if each["role"] == "system")

    def asked(self, text: str) -> Chat:
        """Return the chat with a person's message."""
        return replace(self, messages=(*self.messages, {"role": "user", "content": text}))

    def answered(self, text: str) -> Chat:
        """Return the chat with the model's answer."""
        return replace(self, messages=(*self.messages, {"role": "assistant", "content": text}))

    def body(self) -> dict[str, object]:
        """Return the request whose answer goes on with the chat."""
        return {**self.parameters, "model": self.model, "messages": list(self.messages)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a line came to. chat: None ends it;  said: what is told to the person"""

    chat: Chat | None
    said: str = ""


def commanded(chat: Chat, line: str) -> Turn:
    """Carry out a line that begins with a slash."""
    name, _, rest = line.partition(" ")
    text = rest.strip()
    match name:
        case "/help":
            return Turn(chat=chat, said="\n".join(f"{each:<14}{about}" for each, about in COMMANDS.items()))
        case "/model" if not text:
            return Turn(chat=chat, said=chat.model)
        case "/model":
            return Turn(chat=replace(chat, model=text), said=f"{text} answers from here on.")
        case "/system":
            system = text or None
            return Turn(
                chat=Chat.begun(chat.model, system=system, parameters=chat.parameters),
                said="A new chat." if system else "A new chat, without a system's message.",
            )
        case "/reset":
            return Turn(chat=replace(chat, messages=chat.system), said="Forgotten.")
        case "/history":
            return Turn(chat=chat, said="\n".join(f"{each['role']}: {each['content']}" for each in chat.messages))
        case "/exit" | "/quit":
            return Turn(chat=None)
        case _:
            near = get_close_matches(name, [each.partition(" ")[0] for each in COMMANDS], n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            return Turn(chat=chat, said=f"There is no {name}.{hint} /help lists what there is.")
