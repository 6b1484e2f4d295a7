"""Every parameter of a completion, declared once in its annotation, in groups by subject."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, model_validator

from serve_app.api.forms.constraints import EBNF, REGEX, Choices, Grammar, JsonSchema, ResponseFormat, StructuredOutputs
from serve_app.api.forms.form import (
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
    WORDS,
    Breakers,
    CountOrFlag,
    FlagOr,
    Integer,
    Members,
    OneOf,
    Parameter,
    Real,
    Text,
)
from serve_app.api.forms.images import Images
from serve_app.api.forms.messages import Choice, ToolList
from serve_app.api.forms.names import ADAPTER, AdapterNames, AdapterScales, ModelNames, Samplers
from serve_app.api.forms.prompts import ALLOWED_IDS, STOP_IDS, LogitBias, Prediction, Prompts, Speculation
from serve_app.api.limits import INT32_MAX, INT64_MAX
from serve_app.core.prompt import Image, Infill, Prompt, SuffixMode
from serve_app.core.request import DRY_ALLOWED_LENGTH, DRY_BASE, Constraint, SamplerName
from serve_app.core.tools import Tool, ToolChoice, Tools


class StreamOptions(BaseModel):
    """What a stream reports beside text."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    include_usage: Annotated[bool, Parameter(FLAG, "One last chunk carries the usage of the whole response.")] = False
    continuous_usage_stats: Annotated[bool, Parameter(FLAG, "Every chunk carries the usage of its choice so far.")] = (
        False
    )


class Amount(BaseModel):
    """How many completions of which length, and what gives way where the context is short.

    best_of: None ranks nothing
    """

    n: Annotated[int, Parameter(COMPLETIONS, "Completions returned for each prompt.")] = 1
    best_of: Annotated[
        int | None, Parameter(COMPLETIONS, "Completions compared for each prompt, of which the best are returned.")
    ] = None
    max_tokens: Annotated[int, Parameter(LENGTH, "Tokens generated at most.")] = 16
    min_tokens: Annotated[int, Parameter(COUNT, "Tokens generated at least, before anything ends the text.")] = 0
    truncate_sequence: Annotated[
        bool, Parameter(FLAG, "A prompt that leaves no room in the context loses its beginning.")
    ] = False
    truncate_prompt_tokens: Annotated[
        int | None,
        Parameter(
            Integer(low=-1, besides="; -1 is what `max_tokens` leaves of the context, 0 no bound", read_as={0: None}),
            "Tokens of a prompt that are kept.",
        ),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"],
        Parameter(OneOf("left", "right"), "Where a prompt loses what `truncate_prompt_tokens` does not keep."),
    ] = "left"
    context_length_exceeded_behavior: Annotated[
        Literal["truncate", "error"],
        Parameter(
            OneOf("truncate", "error"), "Whether a completion that does not fit the context is shortened or refused."
        ),
    ] = "truncate"


class Calling(BaseModel):
    """Tools, and which of them the text calls.

    tool_choice: None is `auto` where there are tools
    parallel_tool_calls: None is what `calls_in_parallel` says
    """

    calls_in_parallel: ClassVar[bool] = False

    tools: Annotated[tuple[InstanceOf[Tool], ...], Parameter(ToolList(), "Functions that the text may call.")] = ()
    tool_choice: Annotated[
        InstanceOf[ToolChoice] | None, Parameter(Choice(), "Whether the text calls a function, and which.")
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Parameter(FLAG, "Whether one text may hold several calls, as a list.")
    ] = None

    @property
    def tool_use(self) -> Tools:
        """Return what to do with the tools."""
        is_parallel = self.calls_in_parallel if self.parallel_tool_calls is None else self.parallel_tool_calls
        choice = self.tool_choice or ToolChoice(mode="auto")
        return Tools(sent=self.tools, choice=choice, is_parallel=is_parallel) if self.tools else Tools()


class Held(BaseModel):
    """The sources of a constraint."""

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
    guided_choice: Annotated[
        InstanceOf[Constraint] | None, Parameter(Choices(), "The text is one of these strings.")
    ] = None
    structured_outputs: Annotated[
        InstanceOf[Constraint] | None,
        Parameter(StructuredOutputs(), "What the text has to be: JSON, of an expression, one of a few, of a grammar."),
    ] = None

    @property
    def constraint(self) -> Constraint | None:
        """Return what the text has to be; None is any text."""
        sources = (getattr(self, name) for name in Held.model_fields)
        return next((source for source in sources if source is not None), None)


class Predicted(BaseModel):
    """A hint that changes no completion, but what it takes: tokens that were expected are computed several at once."""

    prediction: Annotated[
        str | None,
        Parameter(Prediction(), "What the completion is expected to be, most of it; where it is, it comes faster."),
    ] = None
    speculation: Annotated[
        str | tuple[int, ...] | None,
        Parameter(Speculation(), "The same as text or token ids alone."),
    ] = None

    @property
    def expected(self) -> str | tuple[int, ...]:
        """Return the expected text or token ids; empty if nothing is expected."""
        return self.prediction or self.speculation or ""


class Prompted(BaseModel):
    """Prompts, each completed by itself.

    prompts: with every image in its place;  images: as they were sent beside them
    """

    prompts: Annotated[
        tuple[InstanceOf[Prompt], ...],
        Parameter(Prompts(), "What is completed; every prompt of a list by itself.", "prompt"),
    ]
    add_special_tokens: Annotated[
        bool, Parameter(FLAG, "Whether a prompt that begins with text gets the tokenizer's BOS before it.")
    ] = True
    images: Annotated[
        tuple[InstanceOf[Image], ...] | tuple[tuple[InstanceOf[Image], ...], ...],
        Parameter(Images(), "Images in the places of the `<image>` markers of the prompt, in their order."),
    ] = ()


class Recorded(BaseModel):
    """What SGLang returns beside a text, where the operator allows it."""

    return_hidden_states: Annotated[
        bool | Literal["last"],
        Parameter(FlagOr("last"), "What the last layer gave, for each token that was drawn or for the last alone."),
    ] = False
    return_routed_experts: Annotated[
        bool, Parameter(FLAG, "Which experts every token was sent to is returned, of models that have experts.")
    ] = False


class Sampling(BaseModel):
    """The chain of samplers, the penalties and the seed.

    A None says: seed is to be drawn; repeat_last_n has no window at all; mirostat was not sent; samplers run, and
    temperature stands, in the dialect's order.
    """

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
    temperature_last: Annotated[
        bool | None, Parameter(FLAG, "Whether temperature comes after truncation, where `samplers` was not sent.")
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
            Real(
                low=0,
                high=lambda terms: terms.dialect.max_repetition_penalty,
                besides="; what is below 0.01 counts as 0.01",
            ),
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
    allowed_token_ids: Annotated[
        tuple[int, ...] | None,
        Parameter(ALLOWED_IDS, "Only these tokens are drawn, the end of text among them or never."),
    ] = None
    bad_words: Annotated[
        tuple[str, ...], Parameter(WORDS, "The last token of each is not drawn behind the tokens before it.")
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


INDENT = Integer(low=0, high=200)


class Stopping(BaseModel):
    """Strings, tokens and patterns that end a text."""

    stop: Annotated[tuple[str, ...], Parameter(STOPS, "Ends the text before the first of these strings.")] = ()
    stop_token_ids: Annotated[tuple[int, ...], Parameter(STOP_IDS, "Ends the text at any of these tokens.")] = ()
    stop_regex: Annotated[
        tuple[str, ...], Parameter(PATTERNS, "Ends the text where one of these patterns matches.")
    ] = ()
    n_indent: Annotated[
        int, Parameter(INDENT, "Ends the text before a line that is indented by fewer spaces or tabs; 0 is off.")
    ] = 0
    t_max_predict_ms: Annotated[
        int,
        Parameter(
            Integer(low=-1, besides="; 0 and -1 are no limit", read_as={-1: 0}),
            "Ends the text at the first line break that comes so many milliseconds after its first token.",
        ),
    ] = 0
    no_stop_trim: Annotated[bool, Parameter(FLAG, "What ended the text stays in it.")] = False
    ignore_eos: Annotated[bool, Parameter(FLAG, "The model's own end of text does not end it.")] = False


class Suffixed(BaseModel):
    """A text behind every completion.

    suffix_mode: None leaves it to dialect and model; where the model is known it is settled
    gap:         of a body that is about a gap alone
    """

    suffix: Annotated[
        str | None,
        Parameter(
            Text(max_chars=lambda terms: terms.limits.max_prompt_chars),
            "The text behind the completion: what the completion joins with, or what is appended to it; empty is none.",
        ),
    ] = None
    suffix_mode: Annotated[
        InstanceOf[SuffixMode] | None,
        Parameter(
            OneOf("fim", "append", read_as=SuffixMode),
            "Whether `suffix` is told to the model, which fills the gap before it, or is appended.",
        ),
    ] = None
    gap: Annotated[InstanceOf[Infill] | None, Field(exclude=True, repr=False)] = None

    @property
    def infill(self) -> Infill | None:
        """The gap that the model is asked to fill, if any."""
        if self.gap is not None:
            return self.gap
        return Infill(suffix=self.suffix) if self.suffix and self.suffix_mode is SuffixMode.FIM else None


MAX_SALT_CHARS = 1024


class Target(BaseModel):
    """The models that a body names, with their adapters, and whom it speaks for.

    model:  the name as the response has it: of a list of models, all names with commas between them
    listed: the names of a list; where one name was sent, none
    """

    model: Annotated[
        str,
        Parameter(
            ModelNames(),
            "A base model, an adapter as `base:adapter`, a mix as `base:name*0.7+name*0.3`, or an alias; of a list each"
            " answers.",
        ),
    ]
    listed: Annotated[tuple[str, ...], Field(exclude=True, repr=False)] = ()
    lora_path: Annotated[
        str | tuple[str | None, ...] | None,
        Parameter(AdapterNames(), "An adapter of the model for all prompts, or for each."),
    ] = None
    lora: Annotated[
        tuple[tuple[int, float], ...],
        Parameter(AdapterScales(), "Adapters of the model by their numbers at /lora-adapters, and how much of each."),
    ] = ()
    adapter: Annotated[
        str | None, Parameter(ADAPTER, "An adapter of the model, which must not select another one.")
    ] = None
    user: Annotated[
        str | None, Parameter(Text(), "Names the end user in the service's log; the completion is the same.")
    ] = None
    cache_prompt: Annotated[bool, Parameter(FLAG, "Whether prefixes computed before may be used.")] = True
    cache_salt: Annotated[
        str,
        Parameter(
            Text(max_chars=lambda terms: MAX_SALT_CHARS),
            "What is kept of prefixes, images and constraints is shared by requests of the same salt and no other.",
        ),
    ] = ""

    @model_validator(mode="before")
    @classmethod
    def _join(cls, values: Any) -> Any:
        """Keep a list of models as it was sent, beside the name that it has in the response."""
        if isinstance(values, dict) and isinstance(values.get("model"), tuple):
            return {**values, "model": ",".join(values["model"]), "listed": values["model"]}
        return values

    @property
    def scales(self) -> Mapping[int, float]:
        """Return the scales that `lora` sets, by adapter number; the last one counts."""
        return {number: scale for number, scale in dict(self.lora).items() if scale}

    @property
    def models(self) -> tuple[str, ...]:
        """Return every model name that answers."""
        return self.listed or (self.model,)


MAX_PROMPT_LOGPROBS = 20
MAX_REQUEST_ID_CHARS = 256


class Shown(BaseModel):
    """What a client sees of a completion: as a stream or whole, with what beside its text.

    response_fields: of llama.cpp's own results, which alone have them
    """

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
    prompt_logprobs: Annotated[
        int | None,
        Parameter(
            Integer(low=0, high=lambda terms: max(MAX_PROMPT_LOGPROBS, terms.max_logprobs)),
            "So many likeliest tokens at each position of the prompt, with its own, their log-probabilities and ranks.",
        ),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool, Parameter(FLAG, "Tokens in `logprobs` are written as `token_id:` and their number.")
    ] = False
    post_sampling_probs: Annotated[
        bool, Parameter(FLAG, "Log-probabilities of the distribution that tokens were drawn from.")
    ] = False
    skip_special_tokens: Annotated[bool, Parameter(FLAG, "Whether tokens like the end of text are left out of it.")] = (
        True
    )
    return_token_ids: Annotated[bool, Parameter(FLAG, "The token ids of prompt and completion are returned.")] = False
    request_id: Annotated[
        str | None,
        Parameter(Text(min_chars=1, max_chars=lambda terms: MAX_REQUEST_ID_CHARS), "What follows `cmpl-` in `id`."),
    ] = None
    return_cached_tokens_details: Annotated[
        bool, Parameter(FLAG, "How much of the prompt was cached, and where, is returned.")
    ] = False
    response_fields: Annotated[tuple[str, ...], Field(exclude=True, repr=False)] = ()
    timings_per_token: Annotated[bool, Parameter(FLAG, "Timings are returned.")] = False
