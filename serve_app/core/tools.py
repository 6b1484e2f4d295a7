"""Functions that a model may call, which of them it may or must, and the calls that it made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ToolMode = Literal["none", "auto", "required"]
ToolParserName = Literal[
    "hermes", "qwen", "llama3", "llama3_json", "mistral", "mistral_named", "json", "qwen3_coder", "glm45", "glm47"
]
"""Forms that calls are written in, by which an operator may name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One function.

    parameters: JSON schema of its arguments' object; None is a function without any
    is_strict:  arguments have to satisfy the schema; otherwise any object will do
    at:         its place in the list that was sent
    sent:       the whole tool as it was sent, for a chat template; nobody changes it
    """

    name: str
    at: int
    sent: Mapping[str, Any]
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether tools are called.

    mode:  none calls nothing, auto leaves it to the model, required makes it call
    names: of the functions that may be called; None is all of them
    """

    mode: ToolMode
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a request says of tools, completed: nothing where `usable` is empty.

    sent:        every tool of the request
    is_parallel: one text may hold several calls
    """

    sent: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice(mode="none")
    is_parallel: bool = False

    @property
    def usable(self) -> tuple[Tool, ...]:
        """Those that the model may call."""
        if self.choice.mode == "none":
            return ()
        names = self.choice.names
        return self.sent if names is None else tuple(tool for tool in self.sent if tool.name in names)

    @property
    def names(self) -> frozenset[str]:
        """Of those that the model may call."""
        return frozenset(tool.name for tool in self.usable)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that is whole.

    arguments: JSON of an object, as the model wrote it
    """

    id: str
    name: str
    arguments: str

    def body(self) -> dict[str, object]:
        """As OpenAI has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """What one call gained.

    index:     of the call in its text
    id, name:  on the first delta of a call, and only there
    arguments: a piece of their JSON; all pieces of a call make the whole
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def body(self) -> dict[str, object]:
        """As OpenAI has it in a chunk."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}
