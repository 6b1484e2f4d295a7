"""Functions that a model may call, which of them it may or must, and the calls that it made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

ToolMode = Literal["none", "auto", "required"]
ToolParserName = Literal[
    "hermes", "qwen", "qwen25", "ernie45", "exaone", "granite4", "smollm3", "interns1", "qwen3_coder", "qwen3_xml",
    "step3p5", "mimo", "nemotron_v3", "seed_oss", "glm45", "glm47", "glm4", "longcat", "minimax_m2", "minimax-m2",
    "deepseek_v32", "deepseekv32", "deepseek_v4", "deepseekv4", "step3", "llama3", "llama3_json", "llama4",
    "llama4_json", "llama4_pythonic", "pythonic", "olmo3", "lfm2", "gemma3", "gemma4", "functiongemma", "mistral",
    "mistral_named", "deepseek_v3", "deepseek_r1", "deepseekv3", "deepseek_v31", "deepseekv31", "kimi_k2", "harmony",
    "openai", "gpt-oss", "gpt_oss", "granite", "granite-20b-fc", "phi4_mini", "phi4_mini_json", "cohere", "command_a",
    "command_r", "cohere_command3", "internlm", "hunyuan", "hunyuan_a13b", "hy_v3", "jamba", "minimax", "apriel",
    "nemotron", "nemotron_json", "apertus", "functionary", "react", "firefunction", "functools", "xlam", "gigachat3",
    "json",
]  # fmt: skip
"""Forms that calls are written in, by which an operator may name them."""
ReasoningParserName = Literal[
    "none", "think", "qwen3", "glm45", "deepseek_v3", "deepseek-v3", "deepseek_v31", "nemotron_v3", "nano_v3", "olmo3",
    "interns1", "mimo", "kimi_k2", "smollm3", "holo2", "deepseek_r1", "deepseek-r1", "qwen3-thinking", "step3",
    "step3p5", "minimax", "minimax_m2", "minimax_m2_append_think", "minimax-append-think", "hunyuan_a13b", "hunyuan",
    "ernie45", "kimi", "mistral", "magistral", "seed_oss", "exaone", "minicpm", "openthinker", "gemma4", "command_a",
    "cohere_command3", "granite", "apriel", "harmony", "openai_gptoss", "gpt-oss", "gpt_oss",
]  # fmt: skip
"""Forms that thoughts are written in, by which an operator may name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One function.

    parameters: JSON schema of its arguments' object; None is a function without any
    is_strict:  arguments have to satisfy the schema; otherwise any object will do
    at:         its place in the list that was sent
    sent:       the whole tool as it was sent, for a chat template; read-only
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
        """Return the call as OpenAI's responses have it."""
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
        """Return the delta as OpenAI's chunks have it."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


def one_per_call(deltas: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Return one delta for each call."""
    merged: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        first = merged.setdefault(delta.index, delta)
        if first is not delta:
            merged[delta.index] = replace(first, arguments=first.arguments + delta.arguments)
    return list(merged.values())


def joined_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Return the calls that these deltas make, in their order."""
    whole = one_per_call(deltas)
    return tuple(ToolCall(id=each.id or "", name=each.name or "", arguments=each.arguments) for each in whole)
