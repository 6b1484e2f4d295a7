"""The body of POST /v1/completions: every parameter that is carried out, checked."""

from __future__ import annotations

import secrets
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, TypeAdapter

from serve_app.api.dialects.dialect import BestOf, Dialect
from serve_app.api.dialects.tables import UNION
from serve_app.api.limits import DEFAULT_LIMITS, INT32_MAX, INT64_MAX
from serve_app.core.request import Prompt, SamplerName

SEED_BITS = 53
"""Of a seed that is drawn: as many as every JSON reader keeps."""

Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
Window = Annotated[int, Field(ge=-1, le=INT32_MAX)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Strength = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]

DRY_BREAKERS = ("\n", ":", '"', "*")


class StreamOptions(BaseModel):
    """What a stream reports beside text.

    include_usage:          one last chunk with the usage of the whole response
    continuous_usage_stats: every chunk with the usage of its choice so far
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionRequest(BaseModel):
    """What a client asked for, with the defaults of its dialect filled in; those here are of `union`.

    max_tokens:     -1 is until the context ends;  max_tokens_name: as the client spelled it
    best_of:        counts as the dialect says; None ranks nothing
    top_k:          0 keeps all
    seed:           None draws one
    repeat_last_n:  the window of the three penalties; -1 is the whole context, None no window at all
    mirostat:       None was not sent
    samplers:       None is the dialect's order
    logit_bias:     from a token id or a text whose tokens all get it; minus infinity bans
    lora_path:      an adapter's name for all prompts, or one (or None) for each
    lora:           adapters by their place in the base's list, with scales
    ignored_parameters: names that were sent and are nobody's
    max_total_tokens: what all completions together may come to
    echo_last:      so many last tokens of the prompt are echoed
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    max_tokens_name: Annotated[str, Field(exclude=True, repr=False)] = "max_tokens"
    ignored_parameters: Annotated[tuple[str, ...], Field(exclude=True, repr=False)] = ()
    max_total_tokens: Annotated[int, Field(exclude=True, repr=False)] = DEFAULT_LIMITS.max_total_tokens
    dialect: Annotated[InstanceOf[Dialect], Field(default_factory=lambda: UNION, exclude=True, repr=False)]
    model: Annotated[str, Field(min_length=1)]
    prompts: Annotated[tuple[InstanceOf[Prompt], ...], Field(min_length=1)]
    lora_path: str | tuple[str | None, ...] | None = None
    lora: tuple[tuple[int, float], ...] = ()
    user: str | None = None
    cache_prompt: bool = True

    n: Annotated[int, Field(ge=1)] = 1
    best_of: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 16
    min_tokens: Count = 0
    truncate_sequence: bool = False
    context_length_exceeded_behavior: Literal["truncate", "error"] = "truncate"

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Fraction = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0
    min_p: Fraction = 0.0
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    typical_p: Share = 1.0
    top_n_sigma: Annotated[float, Field(le=INT32_MAX, allow_inf_nan=False)] = -1.0
    min_keep: Count = 0
    samplers: tuple[SamplerName, ...] | None = None
    dynatemp_range: Strength = 0.0
    dynatemp_exponent: Strength = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Strength = 1.0
    repeat_last_n: Window | None = None
    logit_bias: tuple[tuple[int | str, float], ...] = ()
    mirostat: Annotated[int, Field(ge=0, le=2)] | None = None
    mirostat_tau: Rate = 5.0
    mirostat_eta: Rate = 0.1
    dry_multiplier: Strength = 0.0
    dry_base: Strength = 1.75
    dry_allowed_length: Count = 2
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    dry_penalty_last_n: Window = -1
    xtc_probability: Fraction = 0.0
    xtc_threshold: Fraction = 0.1

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    no_stop_trim: bool = False
    ignore_eos: bool = False

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    echo: bool = False
    echo_last: Count = 0
    logprobs: Annotated[int, Field(ge=0)] | None = None
    post_sampling_probs: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_cached_tokens_details: bool = False
    timings_per_token: bool = False

    @property
    def num_candidates(self) -> int:
        """Completions computed for each prompt."""
        if self.best_of is None or self.dialect.best_of is BestOf.RETURNED:
            return self.n
        return self.best_of

    @property
    def num_returned(self) -> int:
        """Completions returned for each prompt."""
        if self.best_of is None or self.dialect.best_of is BestOf.CANDIDATES:
            return self.n
        return self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether completions are compared before they are returned; one alone is not."""
        return self.best_of is not None and self.num_candidates > 1

    @property
    def num_choices(self) -> int:
        """Completions computed in all."""
        return len(self.prompts) * self.num_candidates

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

    def lora_path_of(self, prompt_index: int) -> str | None:
        """The adapter that was named for this prompt beside the model."""
        if isinstance(self.lora_path, tuple):
            return self.lora_path[prompt_index]
        return self.lora_path

    def seeded(self) -> CompletionRequest:
        """The same with a seed, drawn where none was sent, so that the completion can be asked for again."""
        return self if self.seed is not None else self.model_copy(update={"seed": secrets.randbits(SEED_BITS)})


@cache
def field_schema(name: str) -> dict[str, Any]:
    """The JSON schema of a field's values, which is the only statement of its range."""
    field = CompletionRequest.model_fields[name]
    annotation: Any = field.annotation
    for constraint in field.metadata:
        annotation = Annotated[annotation, constraint]
    return TypeAdapter(annotation).json_schema()
