"""The body of POST /v1/completions: every parameter that is carried out, each declared once in its annotation."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, InstanceOf

from serve_app.api.dialects.dialect import BestOf, Dialect
from serve_app.api.dialects.tables import UNION
from serve_app.api.forms.adapters import AdapterNames, AdapterScales
from serve_app.api.forms.constraints import EBNF, REGEX, Grammar, JsonSchema, ResponseFormat
from serve_app.api.forms.form import Parameter
from serve_app.api.forms.numbers import CountOrFlag, Integer, Real
from serve_app.api.forms.plain import Members, OneOf, Text
from serve_app.api.forms.prompts import Prompts
from serve_app.api.forms.samplers import Samplers
from serve_app.api.forms.shared import (
    CANDIDATES,
    COMPLETIONS,
    COUNT,
    FLAG,
    FRACTION,
    LENGTH,
    PATTERNS,
    PENALTY,
    RATE,
    SHARE,
    STOPS,
    STRENGTH,
    WINDOW,
)
from serve_app.api.forms.strings import Breakers
from serve_app.api.forms.tokens import LogitBias, TokenIds
from serve_app.api.limits import DEFAULT_LIMITS, INT32_MAX, INT64_MAX
from serve_app.api.stream_options import StreamOptions
from serve_app.core.constraint import Constraint
from serve_app.core.request import DRY_ALLOWED_LENGTH, DRY_BASE, Prompt, SamplerName

SEED_BITS = 53
"""Of a seed that is drawn: as many as every JSON reader keeps."""


class CompletionRequest(BaseModel):
    """What a client asked for, with the defaults of its dialect filled in; those here are of `union`.

    max_tokens_name:    as the client spelled it
    ignored_parameters: names that were sent and are nobody's
    max_total_tokens:   what all completions together may come to

    A None says: best_of ranks nothing; seed is to be drawn; repeat_last_n has no window at all; mirostat was not sent;
    samplers run in the dialect's order.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    max_tokens_name: Annotated[str, Field(exclude=True, repr=False)] = "max_tokens"
    ignored_parameters: Annotated[tuple[str, ...], Field(exclude=True, repr=False)] = ()
    max_total_tokens: Annotated[int, Field(exclude=True, repr=False)] = DEFAULT_LIMITS.max_total_tokens
    dialect: Annotated[InstanceOf[Dialect], Field(default_factory=lambda: UNION, exclude=True, repr=False)]

    # what to complete, and with which model
    model: Annotated[
        str,
        Parameter(
            Text(min_chars=1, max_chars=lambda terms: terms.limits.max_model_chars),
            "A base model, an adapter as `base:adapter`, or an alias.",
        ),
    ]
    prompts: Annotated[
        tuple[InstanceOf[Prompt], ...],
        Parameter(Prompts(), "What is completed; every prompt of a list by itself.", "prompt"),
    ]
    lora_path: Annotated[
        str | tuple[str | None, ...] | None,
        Parameter(AdapterNames(), "An adapter of the model for all prompts, or for each."),
    ] = None
    lora: Annotated[
        tuple[tuple[int, float], ...],
        Parameter(AdapterScales(), "An adapter of the model by its number at /lora-adapters."),
    ] = ()
    user: Annotated[
        str | None, Parameter(Text(), "Names the end user for abuse reports; the completion is the same.")
    ] = None
    cache_prompt: Annotated[bool, Parameter(FLAG, "Whether prefixes computed before may be used.")] = True

    # how much
    n: Annotated[int, Parameter(COMPLETIONS, "Completions returned for each prompt.")] = 1
    best_of: Annotated[
        int | None, Parameter(COMPLETIONS, "Completions compared for each prompt, of which the best are returned.")
    ] = None
    max_tokens: Annotated[int, Parameter(LENGTH, "Tokens generated at most.")] = 16
    min_tokens: Annotated[int, Parameter(COUNT, "Tokens generated at least, before anything ends the text.")] = 0
    truncate_sequence: Annotated[
        bool, Parameter(FLAG, "A prompt that leaves no room in the context loses its beginning.")
    ] = False
    context_length_exceeded_behavior: Annotated[
        Literal["truncate", "error"],
        Parameter(
            OneOf("truncate", "error"), "Whether a completion that does not fit the context is shortened or refused."
        ),
    ] = "truncate"

    # sampling
    temperature: Annotated[
        float, Parameter(Real(low=0, high=2), "Divides the logits; 0 takes the likeliest token.")
    ] = 1.0
    top_p: Annotated[
        float,
        Parameter(
            Real(low=0, high=1, besides="; 0 keeps the likeliest token alone"),
            "Keeps the smallest likeliest set whose probability reaches it.",
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Parameter(
            Integer(
                low=-1,
                high=lambda terms: terms.dialect.max_top_k,
                besides="; 0 and -1 keep every token",
                read_as={-1: 0},
            ),
            "Keeps so many likeliest tokens.",
        ),
    ] = 0
    min_p: Annotated[
        float, Parameter(FRACTION, "Keeps tokens of at least this share of the likeliest one's probability.")
    ] = 0.0
    seed: Annotated[
        int | None,
        Parameter(
            Integer(low=-INT64_MAX - 1, high=INT64_MAX, besides="; -1 is a random one", read_as={-1: None}),
            "Decides every draw, so that a completion can be asked for again.",
        ),
    ] = None
    typical_p: Annotated[
        float, Parameter(SHARE, "Keeps the smallest set of tokens of typical surprise that reaches it; 1 keeps all.")
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        Parameter(
            Real(high=INT32_MAX, besides="; 0 or less keeps every token"),
            "Keeps logits within so many standard deviations of the highest.",
        ),
    ] = -1.0
    min_keep: Annotated[int, Parameter(COUNT, "Tokens that each truncation leaves at least.")] = 0
    samplers: Annotated[
        tuple[SamplerName, ...] | None, Parameter(Samplers(), "What chooses the token, in this order.")
    ] = None
    dynatemp_range: Annotated[
        float, Parameter(STRENGTH, "The temperature moves by so much with the entropy; 0 is off.")
    ] = 0.0
    dynatemp_exponent: Annotated[float, Parameter(STRENGTH, "How the temperature follows the entropy.")] = 1.0
    presence_penalty: Annotated[float, Parameter(PENALTY, "Taken once from the logit of every token seen.")] = 0.0
    frequency_penalty: Annotated[float, Parameter(PENALTY, "Taken from a token's logit as often as it was seen.")] = 0.0
    repetition_penalty: Annotated[
        float,
        Parameter(
            Real(low=0, high=100, besides="; what is below 0.01 counts as 0.01"),
            "Divides positive logits of tokens seen and multiplies negative ones; 1 is off.",
        ),
    ] = 1.0
    repeat_last_n: Annotated[
        int | None, Parameter(WINDOW, "The three penalties see so many last tokens; 0 switches them off.")
    ] = None
    logit_bias: Annotated[
        tuple[tuple[int | str, float], ...],
        Parameter(LogitBias(), "Added to the logits of these tokens, at most 100 either way; false bans."),
    ] = ()
    mirostat: Annotated[
        int | None,
        Parameter(Integer(low=0, high=2), "The version of Mirostat that takes the place of other samplers; 0 is none."),
    ] = None
    mirostat_tau: Annotated[float, Parameter(RATE, "Mirostat's target surprise, in bits.")] = 5.0
    mirostat_eta: Annotated[float, Parameter(RATE, "Mirostat's learning rate.")] = 0.1
    dry_multiplier: Annotated[
        float, Parameter(STRENGTH, "How much DRY takes from tokens that would continue a repetition; 0 is off.")
    ] = 0.0
    dry_base: Annotated[
        float, Parameter(STRENGTH, f"How fast that grows with the length of the repetition; below 1 is {DRY_BASE}.")
    ] = DRY_BASE
    dry_allowed_length: Annotated[int, Parameter(COUNT, "Shorter repetitions are free.")] = DRY_ALLOWED_LENGTH
    dry_sequence_breakers: Annotated[
        tuple[str, ...], Parameter(Breakers(), "Texts across which no repetition is followed.")
    ] = ("\n", ":", '"', "*")
    dry_penalty_last_n: Annotated[int, Parameter(WINDOW, "DRY sees so many last tokens.")] = -1
    xtc_probability: Annotated[
        float, Parameter(FRACTION, "How often XTC drops all but the least likely of the tokens above its threshold.")
    ] = 0.0
    xtc_threshold: Annotated[
        float, Parameter(FRACTION, "The probability that XTC asks of a token; above 0.5 is off.")
    ] = 0.1

    # stopping
    stop: Annotated[tuple[str, ...], Parameter(STOPS, "Ends the text before the first of these strings.")] = ()
    stop_token_ids: Annotated[tuple[int, ...], Parameter(TokenIds(), "Ends the text at any of these tokens.")] = ()
    stop_regex: Annotated[
        tuple[str, ...], Parameter(PATTERNS, "Ends the text where one of these patterns matches.")
    ] = ()
    no_stop_trim: Annotated[bool, Parameter(FLAG, "What ended the text stays in it.")] = False
    ignore_eos: Annotated[bool, Parameter(FLAG, "The model's own end of text does not end it.")] = False

    # what the text has to be; one of them at most
    response_format: Annotated[
        InstanceOf[Constraint] | None,
        Parameter(ResponseFormat(), "What the text has to be: any text, JSON, JSON of a schema, or of a grammar."),
    ] = None
    grammar: Annotated[
        InstanceOf[Constraint] | None, Parameter(Grammar(), "A grammar that the text has to follow.")
    ] = None
    json_schema: Annotated[
        InstanceOf[Constraint] | None, Parameter(JsonSchema(), "The text is JSON that satisfies this schema.")
    ] = None
    regex: Annotated[InstanceOf[Constraint] | None, Parameter(REGEX, "What the whole text has to match.")] = None
    ebnf: Annotated[InstanceOf[Constraint] | None, Parameter(EBNF, "A grammar that the text has to follow.")] = None

    # what is returned
    stream: Annotated[bool, Parameter(FLAG, "Sends server-sent events as the text is generated.")] = False
    stream_options: Annotated[
        StreamOptions,
        Parameter(Members(tuple(StreamOptions.model_fields)), "What a stream reports beside text."),
    ] = StreamOptions()
    echo: Annotated[bool, Parameter(FLAG, "The prompt comes before the completion.")] = False
    echo_last: Annotated[int, Parameter(COUNT, "So many last tokens of the prompt come before the completion.")] = 0
    logprobs: Annotated[
        int | None,
        Parameter(
            CountOrFlag(count=CANDIDATES), "So many likeliest tokens with their log-probabilities for each position."
        ),
    ] = None
    post_sampling_probs: Annotated[
        bool, Parameter(FLAG, "Log-probabilities of the distribution that tokens were drawn from.")
    ] = False
    skip_special_tokens: Annotated[bool, Parameter(FLAG, "Whether tokens like the end of text are left out of it.")] = (
        True
    )
    return_token_ids: Annotated[bool, Parameter(FLAG, "The token ids of prompt and completion are returned.")] = False
    return_cached_tokens_details: Annotated[
        bool, Parameter(FLAG, "How much of the prompt was cached, and where, is returned.")
    ] = False
    timings_per_token: Annotated[bool, Parameter(FLAG, "Timings are returned.")] = False

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

    @property
    def constraint(self) -> Constraint | None:
        """What the text has to be; None is any text."""
        sources = (self.response_format, self.grammar, self.json_schema, self.regex, self.ebnf)
        return next((source for source in sources if source is not None), None)

    def lora_path_of(self, prompt_index: int) -> str | None:
        """The adapter that was named for this prompt beside the model."""
        if isinstance(self.lora_path, tuple):
            return self.lora_path[prompt_index]
        return self.lora_path

    def seeded(self) -> CompletionRequest:
        """The same with a seed, drawn where none was sent, so that the completion can be asked for again."""
        return self if self.seed is not None else self.model_copy(update={"seed": secrets.randbits(SEED_BITS)})
