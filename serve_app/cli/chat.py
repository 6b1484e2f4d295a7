"""Talks with a model at a terminal, or answers one message."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import MappingProxyType
from urllib.parse import quote

from serve_app.cli.client import Service, ServiceFailed
from serve_app.cli.screen import Exit, remark, say, say_json, whole_lines, write

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


Message = Mapping[str, str]

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "/help": "this list",
        "/model NAME": "go on with another model; without a name, the one that answers",
        "/system TEXT": "say what the model is to be, and begin anew; without a text, no such message",
        "/reset": "forget all that was said",
        "/history": "everything that was said",
        "/exit": "end; Ctrl-D does, too",
    }
)


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
        """With a person's message."""
        return replace(self, messages=(*self.messages, {"role": "user", "content": text}))

    def answered(self, text: str) -> Chat:
        """With the model's."""
        return replace(self, messages=(*self.messages, {"role": "assistant", "content": text}))

    def body(self) -> dict[str, object]:
        """The request whose answer goes on with it."""
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
            return Turn(chat=chat, said=_unknown(name))


def _unknown(name: str) -> str:
    near = get_close_matches(name, [each.partition(" ")[0] for each in COMMANDS], n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"There is no {name}.{hint} /help lists what there is."
