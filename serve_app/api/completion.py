"""The body of POST /v1/completions: every parameter that is carried out, checked."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, InstanceOf

from serve_app.core.request import Prompt

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


class StreamOptions(BaseModel):
    """What a stream reports beside text.

    include_usage:          one last chunk with the usage of the whole response
    continuous_usage_stats: every chunk with the usage of its choice so far
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionRequest(BaseModel):
    """What a client asked for, with the defaults of the dialect `union` filled in.

    top_k:      0 keeps all
    max_tokens: -1 is until the context ends
    seed:       None draws one
    lora_path:  an adapter's name for all prompts, or one (or None) for each
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    model: Annotated[str, Field(min_length=1)]
    prompts: Annotated[tuple[InstanceOf[Prompt], ...], Field(min_length=1)]
    n: Annotated[int, Field(ge=1)] = 1
    max_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 16
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: tuple[str, ...] = ()
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    lora_path: str | tuple[str | None, ...] | None = None
    user: str | None = None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def lora_path_of(self, prompt_index: int) -> str | None:
        """The adapter that was named for this prompt beside the model."""
        if isinstance(self.lora_path, tuple):
            return self.lora_path[prompt_index]
        return self.lora_path
