"""The body of POST /v1/completions: every parameter that is carried out, by groups, and what follows from them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Annotated, ClassVar, Self

from pydantic import ConfigDict, Field, InstanceOf

from serve_app.api.dialects import UNION, UNLIMITED, BestOf, Dialect
from serve_app.api.groups import (
    Amount,
    Calling,
    Held,
    Predicted,
    Prompted,
    Recorded,
    Sampling,
    Shown,
    Stopping,
    Suffixed,
    Target,
)
from serve_app.api.limits import DEFAULT_LIMITS
from serve_app.core.cards import ModelCard
from serve_app.core.prompt import Conversation, Image, Prompt
from serve_app.core.request import SamplerName, samplers_in_order
from serve_app.core.tools import Tool

SEED_BITS = 53
"""Of a seed that is drawn: as many as every JSON reader keeps."""


class CompletionRequest(
    Shown, Recorded, Calling, Held, Stopping, Sampling, Amount, Target, Suffixed, Predicted, Prompted
):
    """What a client asked for, with the defaults of its dialect filled in; those here are of `union`.

    max_tokens_name:    as the client spelled it;  sends_max_tokens: whether it is no dialect's default
    ignored_parameters: names that were sent and are nobody's
    has_default_tool_prompt: the model's template shows no tools, so that a text of ours does; settled by the model
    max_total_tokens:   what all completions together may come to
    id_prefix:          of the response's id;  prompt_name: what is completed, as clients call it
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    id_prefix: ClassVar[str] = "cmpl"
    prompt_name: ClassVar[str] = "prompt"

    max_tokens_name: Annotated[str, Field(exclude=True, repr=False)] = "max_tokens"
    sends_max_tokens: Annotated[bool, Field(exclude=True, repr=False)] = False
    ignored_parameters: Annotated[tuple[str, ...], Field(exclude=True, repr=False)] = ()
    has_default_tool_prompt: Annotated[bool, Field(exclude=True, repr=False)] = False
    max_total_tokens: Annotated[int, Field(exclude=True, repr=False)] = DEFAULT_LIMITS.max_total_tokens
    dialect: Annotated[InstanceOf[Dialect], Field(default_factory=lambda: UNION, exclude=True, repr=False)]

    @property
    def samplers_in_order(self) -> tuple[SamplerName, ...]:
        """Return the samplers that were sent, else all of them in the order that was asked for or is the dialect's."""
        is_last = self.dialect.temperature_last if self.temperature_last is None else self.temperature_last
        return samplers_in_order(self.samplers, is_temperature_last=is_last)

    @property
    def num_candidates(self) -> int:
        """Return how many completions are computed for each prompt."""
        if self.best_of is None or self.dialect.best_of is BestOf.RETURNED:
            return self.n
        return self.best_of

    @property
    def num_returned(self) -> int:
        """Return how many completions are returned for each prompt."""
        if self.best_of is None or self.dialect.best_of is BestOf.CANDIDATES:
            return self.n
        return self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether completions are compared before they are returned; one alone is not."""
        return self.best_of is not None and self.num_candidates > 1

    @property
    def shows_last_state(self) -> bool:
        """Whether of hidden states the last alone is returned, and stands by itself."""
        return self.return_hidden_states == "last" or self.dialect.returns_last_state

    @property
    def num_parts(self) -> int:
        """Return the number of parts: every prompt once for each model, those of the first model first."""
        return len(self.models) * len(self.prompts)

    @property
    def num_choices(self) -> int:
        """Return how many completions are computed in all."""
        return self.num_parts * self.num_candidates

    def own_id(self, response_id: str) -> str:
        """Return the id that the client reads: its own where it sent one."""
        return response_id if self.request_id is None else f"{self.id_prefix}-{self.request_id}"

    def listed_model_of(self, part: int) -> str | None:
        """Return the model of this part if it is one of a list."""
        return self.listed[part // len(self.prompts)] if self.listed else None

    def images_of(self, part: int) -> tuple[Image, ...]:
        """Return the images of a part's prompt."""
        return self.prompt_of(part).images

    def prompt_of(self, part: int) -> Prompt:
        return self.prompts[part % len(self.prompts)]

    @property
    def has_timings(self) -> bool:
        return self.timings_per_token or self.dialect.has_timings

    @property
    def finish_chunk_has_usage(self) -> bool:
        """Whether the last finish chunk carries the usage: the dialect's habit, unless the client chose."""
        return self.dialect.finish_chunk_has_usage and "include_usage" not in self.stream_options.model_fields_set

    @property
    def has_continuous_usage(self) -> bool:
        options = self.stream_options
        return options.continuous_usage_stats and (
            options.include_usage or not self.dialect.continuous_usage_needs_usage
        )

    @property
    def tools_in_prompt(self) -> tuple[Tool, ...]:
        """Return the tools that the prompt shows the model."""
        return ()

    def conversation(self, card: ModelCard) -> Conversation | None:
        """Return what this model's chat template renders as the prompt; None if there is a prompt."""
        return None

    def unread_by(self, template: str) -> tuple[str, ...]:
        """Return the names of what was sent for a chat template and does not occur in this one."""
        return ()

    @property
    def splits_reasoning(self) -> bool:
        """Whether what the model thinks is told apart from what it says."""
        return False

    def lora_path_of(self, prompt_index: int) -> str | None:
        """Return the adapter that was named for this prompt beside the model."""
        if isinstance(self.lora_path, tuple):
            return self.lora_path[prompt_index]
        return self.lora_path

    def defaults_of(self, recommended: Iterable[tuple[str, float]]) -> dict[str, float]:
        """Return the parameters that the model's folder recommends and the client did not send.

        A length bounds what a completion of the dialect's own length would be.
        """
        if not self.dialect.takes_model_defaults:
            return {}
        found = {name: value for name, value in recommended if name not in self.model_fields_set}
        longest = dict(recommended).get("max_tokens")
        if longest is not None and not self.sends_max_tokens:
            own = longest if self.max_tokens == UNLIMITED else min(longest, self.max_tokens)
            found["max_tokens"] = max(own, self.min_tokens)
        return found

    def seeded(self) -> Self:
        """Return the same request with a seed, drawn if none was sent, so that the completion can be repeated."""
        return self if self.seed is not None else self.model_copy(update={"seed": secrets.randbits(SEED_BITS)})
