"""The body of POST /v1/chat/completions: a completion whose prompt a template makes of messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, ClassVar

from pydantic import Field, InstanceOf

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects.dialect import UNLIMITED
from serve_app.api.dispositions import Carried, Disposition, NotYet, Renamed
from serve_app.api.forms.form import Parameter
from serve_app.api.forms.messages import images_of
from serve_app.api.forms.numbers import Integer
from serve_app.api.forms.shared import FLAG
from serve_app.api.groups.conversed import Conversed, conversation_of
from serve_app.api.parameters import PARAMETERS, declared
from serve_app.core.cards import ModelCard
from serve_app.core.prompt import Conversation, Image, Prompt
from serve_app.core.tools import Tool, Tools

MAX_TOP_LOGPROBS = 20


class ChatRequest(Conversed, CompletionRequest):
    """What a client asked for. It has one prompt, which is empty until a replica has rendered it."""

    prompts: Annotated[tuple[InstanceOf[Prompt], ...], Field(exclude=True, repr=False)] = (Prompt(parts=()),)

    id_prefix: ClassVar[str] = "chatcmpl"
    effort_name: ClassVar[str] = "reasoning_effort"
    prompt_name: ClassVar[str] = "messages"

    @property
    def tool_use(self) -> Tools:
        """One text may hold several calls, but one alone where a call is demanded and nothing is said of several: a
        model that must call and does not know when to end would go on to the end of its context."""
        tools = super().tool_use
        if self.parallel_tool_calls is not None:
            return tools
        return replace(tools, is_parallel=tools.choice.mode != "required")

    @property
    def tools_in_prompt(self) -> tuple[Tool, ...]:
        return () if self.tool_use.choice.mode == "none" else self.tool_use.sent

    def conversation(self, card: ModelCard) -> Conversation:
        return conversation_of(self, card, tools=self.tools_in_prompt)

    def unread_by(self, template: str) -> tuple[str, ...]:
        """What was sent for the template to read, and is not named in it."""
        effort = (self.effort_name,) if self.reasoning_effort is not None else ()
        return (
            *(name for name in effort if "reasoning_effort" not in template and "enable_thinking" not in template),
            *(("documents",) if self.documents and "documents" not in template else ()),
            *(f"chat_template_kwargs.{name}" for name in self.chat_template_kwargs if name not in template),
        )

    def images_of(self, part: int) -> tuple[Image, ...]:
        return images_of(self.messages)

    @property
    def splits_reasoning(self) -> bool:
        """A demanded call is there from the beginning of the text."""
        return self.separate_reasoning and self.tool_use.choice.mode != "required"


CHAT_DEFAULTS: Mapping[str, object] = MappingProxyType({"max_tokens": UNLIMITED})
"""Where the dialect says nothing of them. 16 tokens are of no use in a chat, in no system."""
NOT_OF_CHATS: Mapping[str, NotYet] = MappingProxyType(
    {
        "prompt": NotYet(),
        "best_of": NotYet(),
        "echo": NotYet(False),
        "echo_last": NotYet(0),
        "suffix": NotYet(""),
        "images": NotYet([]),
        "suffix_mode": NotYet(),
        "n_probs": NotYet(0),
        "functions": NotYet([]),
        "function_call": NotYet("none", "auto"),
        "modalities": NotYet(["text"]),
        "audio": NotYet(),
        "web_search_options": NotYet(),
        "chat_template": NotYet(),
        "prompt_logprobs": NotYet(),
        "return_tokens_as_token_ids": NotYet(False),
        "thinking": NotYet(instead='Send "reasoning_effort", or "chat_template_kwargs" with what the template reads.'),
        "add_special_tokens": NotYet(False),  # they are the template's to write
        "add_bos_token": NotYet(False),
    }
)
"""Parameters of completions that say nothing of a chat, and of others' chats that are not carried out."""
CHAT_PARAMETERS: Mapping[str, Disposition] = MappingProxyType(
    {
        **{name: each for name, each in PARAMETERS.items() if name not in NOT_OF_CHATS},
        **{name: Carried(parameter) for name, parameter in declared(Conversed).items()},
        "logprobs": Carried(Parameter(FLAG, "The log-probability of each token is returned.")),
        "top_logprobs": Carried(
            Parameter(
                Integer(low=0, high=lambda terms: max(MAX_TOP_LOGPROBS, terms.max_logprobs)),
                "So many likeliest tokens for each position, where `logprobs` is true.",
            )
        ),
        "chat_template_args": Renamed("chat_template_kwargs"),
        **NOT_OF_CHATS,
    }
)
