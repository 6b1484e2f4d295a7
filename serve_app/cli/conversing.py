"""A chat as it goes on: its messages, its model, and what a line that begins with a slash does to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import MappingProxyType

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
