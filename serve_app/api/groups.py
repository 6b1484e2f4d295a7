"""Every parameter of a completion, declared once, in groups by subject."""

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
    Real,
    Text,
    parameter,
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

    include_usage: bool = parameter(False, FLAG, "One last chunk carries the usage of the whole response.")
    continuous_usage_stats: bool = parameter(False, FLAG, "Every chunk carries the usage of its choice so far.")


class Amount(BaseModel):
    """How many completions of which length, and what gives way where the context is short.

    best_of: None ranks nothing
    """

    n: int = parameter(1, COMPLETIONS, "Completions returned for each prompt.")
    best_of: int | None = parameter(
        None, COMPLETIONS, "Completions compared for each prompt, of which the best are returned."
    )
    max_tokens: int = parameter(16, LENGTH, "Tokens generated at most.")
    min_tokens: int = parameter(0, COUNT, "Tokens generated at least, before anything ends the text.")
    truncate_sequence: bool = parameter(False, FLAG, "A prompt that leaves no room in the context loses its beginning.")
    truncate_prompt_tokens: int | None = parameter(
        None,
        Integer(low=-1, besides="; -1 is what `max_tokens` leaves of the context, 0 no bound", read_as={0: None}),
        "Tokens of a prompt that are kept.",
    )
    truncation_side: Literal["left", "right"] = parameter(
        "left", OneOf("left", "right"), "Where a prompt loses what `truncate_prompt_tokens` does not keep."
    )
    context_length_exceeded_behavior: Literal["truncate", "error"] = parameter(
        "truncate",
        OneOf("truncate", "error"),
        "Whether a completion that does not fit the context is shortened or refused.",
    )


class Calling(BaseModel):
    """Tools, and which of them the text calls.

    tool_choice: None is `auto` where there are tools
    parallel_tool_calls: None is what `calls_in_parallel` says
    """

    calls_in_parallel: ClassVar[bool] = False

    tools: tuple[InstanceOf[Tool], ...] = parameter((), ToolList(), "Functions that the text may call.")
    tool_choice: InstanceOf[ToolChoice] | None = parameter(
        None, Choice(), "Whether the text calls a function, and which."
    )
    parallel_tool_calls: bool | None = parameter(None, FLAG, "Whether one text may hold several calls, as a list.")

    @property
    def tool_use(self) -> Tools:
        """Return what to do with the tools."""
        is_parallel = self.calls_in_parallel if self.parallel_tool_calls is None else self.parallel_tool_calls
        choice = self.tool_choice or ToolChoice(mode="auto")
        return Tools(sent=self.tools, choice=choice, is_parallel=is_parallel) if self.tools else Tools()


class Held(BaseModel):
    """The sources of a constraint."""

    response_format: InstanceOf[Constraint] | None = parameter(
        None, ResponseFormat(), "What the text has to be: any text, JSON, JSON of a schema, or of a grammar."
    )
    grammar: InstanceOf[Constraint] | None = parameter(None, Grammar(), "A grammar that the text has to follow.")
    json_schema: InstanceOf[Constraint] | None = parameter(
        None, JsonSchema(), "The text is JSON that satisfies this schema."
    )
    regex: InstanceOf[Constraint] | None = parameter(None, REGEX, "What the whole text has to match.")
    ebnf: InstanceOf[Constraint] | None = parameter(None, EBNF, "A grammar that the text has to follow.")
    guided_choice: InstanceOf[Constraint] | None = parameter(None, Choices(), "The text is one of these strings.")
    structured_outputs: InstanceOf[Constraint] | None = parameter(
        None, StructuredOutputs(), "What the text has to be: JSON, of an expression, one of a few, of a grammar."
    )

    @property
    def constraint(self) -> Constraint | None:
        """Return what the text has to be; None is any text."""
        sources = (getattr(self, name) for name in Held.model_fields)
        return next((source for source in sources if source is not None), None)


class Predicted(BaseModel):
    """A hint that changes no completion, but what it takes: tokens that were expected are computed several at once."""

    prediction: str | None = parameter(
        None, Prediction(), "What the completion is expected to be, most of it; where it is, it comes faster."
    )
    speculation: str | tuple[int, ...] | None = parameter(None, Speculation(), "The same as text or token ids alone.")

    @property
    def expected(self) -> str | tuple[int, ...]:
        """Return the expected text or token ids; empty if nothing is expected."""
        return self.prediction or self.speculation or ""


class Prompted(BaseModel):
    """Prompts, each completed by itself.

    prompts: with every image in its place;  images: as they were sent beside them
    """

    prompts: tuple[InstanceOf[Prompt], ...] = parameter(
        ..., Prompts(), "What is completed; every prompt of a list by itself.", "prompt"
    )
    add_special_tokens: bool = parameter(
        True, FLAG, "Whether a prompt that begins with text gets the tokenizer's BOS before it."
    )
    images: tuple[InstanceOf[Image], ...] | tuple[tuple[InstanceOf[Image], ...], ...] = parameter(
        (), Images(), "Images in the places of the `<image>` markers of the prompt, in their order."
    )


class Recorded(BaseModel):
    """What SGLang returns beside a text, where the operator allows it."""

    return_hidden_states: bool | Literal["last"] = parameter(
        False, FlagOr("last"), "What the last layer gave, for each token that was drawn or for the last alone."
    )
    return_routed_experts: bool = parameter(
        False, FLAG, "Which experts every token was sent to is returned, of models that have experts."
    )


class Sampling(BaseModel):
    """The chain of samplers, the penalties and the seed.

    A None says: seed is to be drawn; repeat_last_n has no window at all; mirostat was not sent; samplers run, and
    temperature stands, in the dialect's order.
    """

    temperature: float = parameter(1.0, Real(low=0, high=2), "Divides the logits; 0 takes the likeliest token.")
    top_p: float = parameter(
        1.0,
        Real(low=0, high=1, besides="; 0 keeps the likeliest token alone"),
        "Keeps the smallest likeliest set whose probability reaches it.",
    )
    top_k: int = parameter(
        0,
        Integer(
            low=-1, high=lambda terms: terms.dialect.max_top_k, besides="; 0 and -1 keep every token", read_as={-1: 0}
        ),
        "Keeps so many likeliest tokens.",
    )
    min_p: float = parameter(0.0, FRACTION, "Keeps tokens of at least this share of the likeliest one's probability.")
    seed: int | None = parameter(
        None,
        Integer(low=-INT64_MAX - 1, high=INT64_MAX, besides="; -1 is a random one", read_as={-1: None}),
        "Decides every draw, so that a completion can be asked for again.",
    )
    typical_p: float = parameter(
        1.0, SHARE, "Keeps the smallest set of tokens of typical surprise that reaches it; 1 keeps all."
    )
    top_n_sigma: float = parameter(
        -1.0,
        Real(high=INT32_MAX, besides="; 0 or less keeps every token"),
        "Keeps logits within so many standard deviations of the highest.",
    )
    min_keep: int = parameter(0, COUNT, "Tokens that each truncation leaves at least.")
    samplers: tuple[SamplerName, ...] | None = parameter(None, Samplers(), "What chooses the token, in this order.")
    temperature_last: bool | None = parameter(
        None, FLAG, "Whether temperature comes after truncation, where `samplers` was not sent."
    )
    dynatemp_range: float = parameter(0.0, STRENGTH, "The temperature moves by so much with the entropy; 0 is off.")
    dynatemp_exponent: float = parameter(1.0, STRENGTH, "How the temperature follows the entropy.")
    presence_penalty: float = parameter(0.0, PENALTY, "Taken once from the logit of every token seen.")
    frequency_penalty: float = parameter(0.0, PENALTY, "Taken from a token's logit as often as it was seen.")
    repetition_penalty: float = parameter(
        1.0,
        Real(
            low=0,
            high=lambda terms: terms.dialect.max_repetition_penalty,
            besides="; what is below 0.01 counts as 0.01",
        ),
        "Divides positive logits of tokens seen and multiplies negative ones; 1 is off.",
    )
    repeat_last_n: int | None = parameter(
        None, WINDOW, "The three penalties see so many last tokens; 0 switches them off."
    )
    logit_bias: tuple[tuple[int | str, float], ...] = parameter(
        (), LogitBias(), "Added to the logits of these tokens, at most 100 either way; false bans."
    )
    allowed_token_ids: tuple[int, ...] | None = parameter(
        None, ALLOWED_IDS, "Only these tokens are drawn, the end of text among them or never."
    )
    bad_words: tuple[str, ...] = parameter(
        (), WORDS, "The last token of each is not drawn behind the tokens before it."
    )
    mirostat: int | None = parameter(
        None, Integer(low=0, high=2), "The version of Mirostat that takes the place of other samplers; 0 is none."
    )
    mirostat_tau: float = parameter(5.0, RATE, "Mirostat's target surprise, in bits.")
    mirostat_eta: float = parameter(0.1, RATE, "Mirostat's learning rate.")
    dry_multiplier: float = parameter(
        0.0, STRENGTH, "How much DRY takes from tokens that would continue a repetition; 0 is off."
    )
    dry_base: float = parameter(
        DRY_BASE, STRENGTH, f"How fast that grows with the length of the repetition; below 1 is {DRY_BASE}."
    )
    dry_allowed_length: int = parameter(DRY_ALLOWED_LENGTH, COUNT, "Shorter repetitions are free.")
    dry_sequence_breakers: tuple[str, ...] = parameter(
        ("\n", ":", '"', "*"), Breakers(), "Texts across which no repetition is followed."
    )
    dry_penalty_last_n: int = parameter(-1, WINDOW, "DRY sees so many last tokens.")
    xtc_probability: float = parameter(
        0.0, FRACTION, "How often XTC drops all but the least likely of the tokens above its threshold."
    )
    xtc_threshold: float = parameter(0.1, FRACTION, "The probability that XTC asks of a token; above 0.5 is off.")


INDENT = Integer(low=0, high=200)


class Stopping(BaseModel):
    """Strings, tokens and patterns that end a text."""

    stop: tuple[str, ...] = parameter((), STOPS, "Ends the text before the first of these strings.")
    stop_token_ids: tuple[int, ...] = parameter((), STOP_IDS, "Ends the text at any of these tokens.")
    stop_regex: tuple[str, ...] = parameter((), PATTERNS, "Ends the text where one of these patterns matches.")
    n_indent: int = parameter(
        0, INDENT, "Ends the text before a line that is indented by fewer spaces or tabs; 0 is off."
    )
    t_max_predict_ms: int = parameter(
        0,
        Integer(low=-1, besides="; 0 and -1 are no limit", read_as={-1: 0}),
        "Ends the text at the first line break that comes so many milliseconds after its first token.",
    )
    no_stop_trim: bool = parameter(False, FLAG, "What ended the text stays in it.")
    ignore_eos: bool = parameter(False, FLAG, "The model's own end of text does not end it.")


class Suffixed(BaseModel):
    """A text behind every completion.

    suffix_mode: None leaves it to dialect and model; where the model is known it is settled
    gap:         of a body that is about a gap alone
    """

    suffix: str | None = parameter(
        None,
        Text(max_chars=lambda terms: terms.limits.max_prompt_chars),
        "The text behind the completion: what the completion joins with, or what is appended to it; empty is none.",
    )
    suffix_mode: InstanceOf[SuffixMode] | None = parameter(
        None,
        OneOf("fim", "append", read_as=SuffixMode),
        "Whether `suffix` is told to the model, which fills the gap before it, or is appended.",
    )
    gap: Annotated[InstanceOf[Infill] | None, Field(exclude=True, repr=False)] = None

    @property
    def infill(self) -> Infill | None:
        """Return the gap that the model is to fill, if any."""
        if self.gap is not None:
            return self.gap
        return Infill(suffix=self.suffix) if self.suffix and self.suffix_mode is SuffixMode.FIM else None


MAX_SALT_CHARS = 1024


class Target(BaseModel):
    """The models that a body names, with their adapters, and whom it speaks for.

    model:  the name as the response has it: of a list of models, all names with commas between them
    listed: the names of a list; where one name was sent, none
    """

    model: str = parameter(
        ...,
        ModelNames(),
        "A base model, an adapter as `base:adapter`, a mix as `base:name*0.7+name*0.3`, or an alias; of a list each"
        " answers.",
    )
    listed: Annotated[tuple[str, ...], Field(exclude=True, repr=False)] = ()
    lora_path: str | tuple[str | None, ...] | None = parameter(
        None, AdapterNames(), "An adapter of the model for all prompts, or for each."
    )
    lora: tuple[tuple[int, float], ...] = parameter(
        (), AdapterScales(), "Adapters of the model by their numbers at /lora-adapters, and how much of each."
    )
    adapter: str | None = parameter(None, ADAPTER, "An adapter of the model, which must not select another one.")
    user: str | None = parameter(None, Text(), "Names the end user in the service's log; the completion is the same.")
    cache_prompt: bool = parameter(True, FLAG, "Whether prefixes computed before may be used.")
    cache_salt: str = parameter(
        "",
        Text(max_chars=lambda terms: MAX_SALT_CHARS),
        "What is kept of prefixes, images and constraints is shared by requests of the same salt and no other.",
    )

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

    stream: bool = parameter(False, FLAG, "Sends server-sent events as the text is generated.")
    stream_options: StreamOptions = parameter(
        StreamOptions(), Members(tuple(StreamOptions.model_fields)), "What a stream reports beside text."
    )
    echo: bool = parameter(False, FLAG, "The prompt comes before the completion.")
    echo_last: int = parameter(0, COUNT, "So many last tokens of the prompt come before the completion.")
    logprobs: int | None = parameter(
        None, CountOrFlag(count=CANDIDATES), "So many likeliest tokens with their log-probabilities for each position."
    )
    prompt_logprobs: int | None = parameter(
        None,
        Integer(low=0, high=lambda terms: max(MAX_PROMPT_LOGPROBS, terms.max_logprobs)),
        "So many likeliest tokens at each position of the prompt, with its own, their log-probabilities and ranks.",
    )
    return_tokens_as_token_ids: bool = parameter(
        False, FLAG, "Tokens in `logprobs` are written as `token_id:` and their number."
    )
    post_sampling_probs: bool = parameter(
        False, FLAG, "Log-probabilities of the distribution that tokens were drawn from."
    )
    skip_special_tokens: bool = parameter(True, FLAG, "Whether tokens like the end of text are left out of it.")
    return_token_ids: bool = parameter(False, FLAG, "The token ids of prompt and completion are returned.")
    request_id: str | None = parameter(
        None, Text(min_chars=1, max_chars=lambda terms: MAX_REQUEST_ID_CHARS), "What follows `cmpl-` in `id`."
    )
    return_cached_tokens_details: bool = parameter(
        False, FLAG, "How much of the prompt was cached, and where, is returned."
    )
    response_fields: Annotated[tuple[str, ...], Field(exclude=True, repr=False)] = ()
    timings_per_token: bool = parameter(False, FLAG, "Timings are returned.")
