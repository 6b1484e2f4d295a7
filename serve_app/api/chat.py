"""The body of POST /v1/chat/completions: a completion whose prompt a chat template makes from messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field, InstanceOf

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import UNLIMITED
from serve_app.api.error_text import shown
from serve_app.api.forms.form import FLAG, Integer, OneOf, Parameter, parameter
from serve_app.api.forms.messages import IMAGE, Documents, Messages, TemplateVariables, images_of, parts_of
from serve_app.api.parameters import PARAMETERS, Carried, Disposition, NotYet, Renamed, declared
from serve_app.core.cards import ModelCard
from serve_app.core.errors import InvalidRequest, UnsupportedParameter
from serve_app.core.prompt import Conversation, Image, Prompt
from serve_app.core.tools import Tool, Tools

DEVELOPER, SYSTEM = "developer", "system"
READ_PARTS = frozenset({"text", "image"})
OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Variables of a template that parameters of their own say."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class Conversed(BaseModel):
    """Messages, and what the model's chat template is to make of them."""

    messages: tuple[dict[str, Any], ...] = parameter(..., Messages(), "The chat so far, the oldest message first.")
    add_generation_prompt: bool = parameter(
        True, FLAG, "The prompt ends where an answer begins; false leaves that out."
    )
    continue_final_message: bool = parameter(
        False, FLAG, "The last message, an assistant's, is gone on with and not answered."
    )
    chat_template_kwargs: dict[str, Any] = parameter(
        {}, TemplateVariables(OWN_VARIABLES), "Further variables for the chat template, as `enable_thinking`."
    )
    documents: list[dict[str, Any]] = parameter(
        [], Documents(), "Texts that the chat template may show the model, as it says; most want `title`, `text`."
    )
    reasoning_effort: str | None = parameter(
        None,
        OneOf(*EFFORTS),
        "A variable of the chat template; and `enable_thinking`, false for `none`, where that is not given.",
    )
    separate_reasoning: bool = parameter(True, FLAG, "What the model thinks is `reasoning_content`; else content.")


def conversation_of(conversed: Conversed, card: ModelCard, *, tools: Sequence[Tool] = ()) -> Conversation:
    """Return everything that this model's chat template gets.

    Raises UnsupportedParameter for parts of a kind that the template does not know, and for tools that nothing shows.
    """
    if tools and card.tool_prompt == "refuse":
        raise UnsupportedParameter.refusing(
            "tools",
            must=f"be absent for {card.name}, whose chat template does not show tools",
            found=f"{len(tools)} of them",
            remedy=(
                "Whoever runs the service has a default text show them by `tools_without_template: prompt` in the"
                " `args` of its application, or gives it another `chat_template`."
            ),
        )
    template = card.template_for(has_tools=bool(tools))
    images = images_of(conversed.messages)
    messages = [_as_known(message, template) for message in conversed.messages]
    variables = {
        **_effort(conversed),
        **({"documents": conversed.documents} if conversed.documents else {}),
        **({"tools": [tool.sent for tool in tools]} if tools else {}),
        "messages": messages,
        "add_generation_prompt": conversed.add_generation_prompt and not conversed.continue_final_message,
    }
    source = json.dumps(variables, ensure_ascii=False, separators=(",", ":"))
    return Conversation(source=source, continues_last=conversed.continue_final_message, images=images)


def _effort(conversed: Conversed) -> dict[str, Any]:
    """Return the variables that were sent and what the effort sets; as in vLLM, the effort wins for the same name."""
    given, effort = conversed.chat_template_kwargs, conversed.reasoning_effort
    return given if effort is None else {"enable_thinking": effort != "none", **given, "reasoning_effort": effort}


def check_continuation(members: Mapping[str, Any]) -> None:
    """Check that a message to continue is an assistant's and that no answer to it begins. Raises InvalidRequest.

    members: as they were sent, the messages as they were read
    """
    if members.get("continue_final_message") is not True:
        return
    if members.get("add_generation_prompt") is True:
        alone = 'be absent or false where "add_generation_prompt" is true, as one of them ends the prompt'
        raise InvalidRequest.refusing("continue_final_message", must=alone, found="true")
    last = members["messages"][-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        must = 'end with a message of the "role" "assistant" and no "tool_calls" where "continue_final_message" is true'
        raise InvalidRequest.refusing("messages", must=must, found=f'one of the "role" "{last["role"]}"')


def _as_known(message: dict[str, Any], template: str) -> dict[str, Any]:
    """Return the message with images as placeholders, and `developer` as `system` for a template without it."""
    for part in parts_of(message):
        if part["type"] not in READ_PARTS and part["type"] not in template:
            must = "be of a type that the model's chat template knows, as text"
            raise UnsupportedParameter.refusing("messages", must=f"hold parts that {must}", found=shown(part["type"]))
    if message["role"] == DEVELOPER and DEVELOPER not in template:
        message = {**message, "role": SYSTEM}
    if not parts_of(message):
        return message
    return {**message, "content": [{name: part[name] for name in part if name != IMAGE} for part in parts_of(message)]}


MAX_TOP_LOGPROBS = 20


class ChatRequest(Conversed, CompletionRequest):
    """What a client asked for. It has one prompt, which is empty until a replica has rendered it."""

    prompts: Annotated[tuple[InstanceOf[Prompt], ...], Field(exclude=True, repr=False)] = (Prompt(parts=()),)

    id_prefix: ClassVar[str] = "chatcmpl"
    effort_name: ClassVar[str] = "reasoning_effort"
    prompt_name: ClassVar[str] = "messages"

    @property
    def tool_use(self) -> Tools:
        """Return what to do with the tools: several calls in one text by default, but one if a call is required.

        A model that must call and does not know when to end would go on to the end of its context.
        """
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
        """Return the names of what was sent for the template and does not occur in it."""
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
        """Whether reasoning is told apart; a required call begins at the first token and leaves no room for it."""
        return self.separate_reasoning and self.tool_use.choice.mode != "required"


CHAT_DEFAULTS: Mapping[str, object] = {"max_tokens": UNLIMITED}
"""Where the dialect says nothing of them. 16 tokens are of no use in a chat, in no system."""
NOT_OF_CHATS: Mapping[str, NotYet] = {
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
"""Parameters of completions that say nothing of a chat, and of others' chats that are not carried out."""
CHAT_PARAMETERS: Mapping[str, Disposition] = {
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
