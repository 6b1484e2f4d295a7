"""Dialects: one table for each foreign API, with its defaults, meanings, limits and errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from serve_app.api.error_text import shown
from serve_app.api.limits import INT32_MAX
from serve_app.core.errors import InvalidRequest, ServeError

UNLIMITED = -1
ONLY_MODEL = "default"
"""What mistral.rs's clients write for the only model there is."""


class ErrorShape(StrEnum):
    """The body of an error before the first byte of a stream."""

    NESTED = '{"error": {…}}, code is the status'
    OPENAI = '{"error": {…}}, code is a word'
    MESSAGE = '{"message": …}'
    VLLM = '{"error": {…}}, type is a class'
    FLAT = '{"object": "error", …}'


class BestOf(StrEnum):
    """What `best_of` counts beside `n`."""

    CANDIDATES = "candidates: the best n of best_of, by mean log-probability"
    RETURNED = "returned: the best best_of of n, by summed log-probability, which keep their indices"


class Suffix(StrEnum):
    """What `suffix` means."""

    INFILL = "infill: what the completion joins with, where the model fills gaps; otherwise appended"
    APPEND = "append: appended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One table. Every parameter of every system is accepted in each; what was sent beats what stands here.

    defaults:          values of parameters that were not sent, where they differ from those of `union`
    temperature_last:  whether temperature comes after truncation, where `samplers` was not sent
    repetition_sees_prompt: whether repetition_penalty counts the prompt's tokens
    takes_zero_tokens: whether `max_tokens` may be sent as 0
    takes_unlimited_tokens: whether `max_tokens` may be sent as -1, for no limit
    max_stop_strings:  None is as many as the server is configured for
    max_logprobs:      at least so many are allowed, more where the server is configured so
    max_top_k:         what `top_k` may be at most
    max_repetition_penalty: what `repetition_penalty` may be at most
    best_of:           what it counts, the best n of `best_of` candidates or the best `best_of` of n
    suffix:            what `suffix` is, where `suffix_mode` was not sent
    takes_mixed_prompts: whether text and token ids may stand in one prompt
    stream_options_need_stream: whether `stream_options` without `stream` is an error
    continuous_usage_needs_usage: whether continuous_usage_stats counts only beside include_usage
    finish_chunk_has_usage: whether the last finish chunk carries the usage where `include_usage` was not sent
    chunks_have_null_usage: whether all other chunks have a `usage` of null where `include_usage` was sent
    has_timings:       whether a response always carries `timings`
    ignores_unknown_bias: whether a logit_bias of an id that the model does not have is left out, not refused
    has_stop_reason:   whether a choice carries vLLM's `stop_reason` beside `matched_stop`
    keeps_regex_match: whether what a stop_regex matched stays in the text
    returns_last_state: whether return_hidden_states: true returns the last one alone, as "last" does
    refuses_unknown:   whether a name that is nobody's parameter is refused; otherwise it is ignored, and that is told
    takes_any_model:   whether any name is served by the only model, unless the server is configured otherwise
    takes_model_defaults: whether sampling that was not sent is what the model's folder recommends, where it does
    default_model:     what `model` is where it was not sent, chats aside; None requires it
    precedence:        names of one parameter, the one that counts first, where several are sent; else they must agree
    overruled_constraints: pairs of parameters that say what the text has to be, of which the first is obeyed where both
                       are sent; any other two contradict each other
    error_shape:       the body of an error before the first byte of a stream
    statuses:          HTTP status by an error's `code`, before that by its own status
    """

    name: str
    defaults: Mapping[str, object] = field(default_factory=dict)
    temperature_last: bool = False
    repetition_sees_prompt: bool = True
    takes_zero_tokens: bool = True
    takes_unlimited_tokens: bool = False
    max_stop_strings: int | None = None
    max_logprobs: int = 5
    max_n: int = 128
    max_top_k: int = INT32_MAX
    max_repetition_penalty: float = 100
    best_of: BestOf = BestOf.CANDIDATES
    suffix: Suffix = Suffix.INFILL
    takes_mixed_prompts: bool = True
    stream_options_need_stream: bool = False
    continuous_usage_needs_usage: bool = False
    finish_chunk_has_usage: bool = False
    chunks_have_null_usage: bool = False
    has_timings: bool = False
    ignores_unknown_bias: bool = False
    has_stop_reason: bool = False
    keeps_regex_match: bool = False
    returns_last_state: bool = False
    refuses_unknown: bool = False
    takes_any_model: bool = False
    takes_model_defaults: bool = False
    default_model: str | None = None
    precedence: tuple[str, ...] = ()
    overruled_constraints: tuple[tuple[str, str], ...] = ()
    error_shape: ErrorShape = ErrorShape.NESTED
    statuses: Mapping[str, int] = field(default_factory=dict)

    @property
    def least_max_tokens(self) -> int:
        """Return the least `max_tokens`; a dialect that takes -1 takes 0, too."""
        if self.takes_unlimited_tokens:
            return UNLIMITED
        return 0 if self.takes_zero_tokens else 1


HEADER = "X-Completions-Dialect"

UNION = Dialect(name="union", takes_unlimited_tokens=True, takes_model_defaults=True)

OPENAI = Dialect(
    name="openai",
    defaults={"context_length_exceeded_behavior": "error"},
    max_stop_strings=4,
    takes_mixed_prompts=False,
    stream_options_need_stream=True,
    continuous_usage_needs_usage=True,
    chunks_have_null_usage=True,
    refuses_unknown=True,
    error_shape=ErrorShape.OPENAI,
)

LLAMA_CPP = Dialect(
    name="llama.cpp",
    defaults={
        "max_tokens": -1,
        "temperature": 0.8,
        "top_p": 0.95,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "repeat_last_n": 64,
    },
    temperature_last=True,
    takes_unlimited_tokens=True,
    finish_chunk_has_usage=True,
    has_timings=True,
    ignores_unknown_bias=True,
    takes_any_model=True,
    precedence=("n_predict", "max_completion_tokens", "max_tokens"),
    overruled_constraints=tuple(
        ("grammar", other)
        for other in ("json_schema", "response_format", "regex", "ebnf", "guided_choice", "structured_outputs")
    ),
)

MISTRAL_RS = Dialect(
    name="mistral.rs",
    defaults={"max_tokens": -1},
    takes_zero_tokens=False,
    max_logprobs=20,
    best_of=BestOf.RETURNED,
    suffix=Suffix.APPEND,
    default_model=ONLY_MODEL,
    error_shape=ErrorShape.MESSAGE,
    statuses={"malformed_json": 400, "400": 422, "adapter_not_found": 422},
)

FIREWORKS = Dialect(
    name="fireworks",
    defaults={"mirostat_tau": 1.5, "no_stop_trim": True},
    takes_zero_tokens=False,
    max_stop_strings=4,
    max_top_k=128,
    max_repetition_penalty=2,
    takes_mixed_prompts=False,
    finish_chunk_has_usage=True,
    refuses_unknown=True,
)

OMLX = Dialect(
    name="omlx",
    defaults={"max_tokens": 32768, "top_p": 0.95},
    temperature_last=True,
    repetition_sees_prompt=False,
    takes_mixed_prompts=False,
)

SGLANG = Dialect(
    name="sglang",
    defaults={"context_length_exceeded_behavior": "error"},
    repetition_sees_prompt=False,
    takes_zero_tokens=False,
    max_logprobs=20,
    max_repetition_penalty=2,
    suffix=Suffix.APPEND,
    takes_mixed_prompts=False,
    returns_last_state=True,
    takes_model_defaults=True,
    keeps_regex_match=True,
    overruled_constraints=(("response_format", "json_schema"),),
    error_shape=ErrorShape.FLAT,
    statuses={"adapter_not_found": 400},
)

VLLM = Dialect(
    name="vllm",
    defaults={"context_length_exceeded_behavior": "error"},
    max_logprobs=20,
    takes_mixed_prompts=False,
    stream_options_need_stream=True,
    continuous_usage_needs_usage=True,
    has_stop_reason=True,
    takes_model_defaults=True,
    error_shape=ErrorShape.VLLM,
)

DIALECTS: Mapping[str, Dialect] = {
    each.name: each for each in (UNION, OPENAI, LLAMA_CPP, MISTRAL_RS, FIREWORKS, OMLX, SGLANG, VLLM)
}


def dialect_named(name: str) -> Dialect:
    """Return the dialect that a client named in the header, in any case. Raises InvalidRequest."""
    dialect = DIALECTS.get(name.strip().lower())
    if dialect is None:
        raise InvalidRequest.refusing(HEADER, must=f"be one of {', '.join(DIALECTS)}", found=shown(name))
    return dialect


CLASSES: Mapping[int, str] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
}


def error_status(error: ServeError, dialect: Dialect = UNION) -> int:
    """Return the HTTP status of an error in this dialect."""
    return dialect.statuses.get(error.code, dialect.statuses.get(str(error.status), error.status))


def error_body(error: ServeError, dialect: Dialect = UNION) -> dict[str, object]:
    """Return the error as a whole response."""
    return SHAPES[dialect.error_shape](error, error_status(error, dialect))


def error_event_body(error: ServeError, dialect: Dialect = UNION) -> dict[str, object]:
    """Return the error as an event of a stream, where every dialect wraps it."""
    is_wrapped = dialect.error_shape in (ErrorShape.OPENAI, ErrorShape.VLLM)
    shape = SHAPES[dialect.error_shape if is_wrapped else ErrorShape.NESTED]
    return shape(error, error_status(error, dialect))


def _members(error: ServeError, status: int, **own: object) -> dict[str, object]:
    """Return the error's facts, OpenAI's four keys and a code for machines; `own` members win."""
    return {
        **error.facts,
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": status,
        "error_code": error.code,
        **own,
    }


def _class_of(status: int) -> str:
    """Return what vLLM and SGLang call an error of this status."""
    return CLASSES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")


SHAPES: Mapping[ErrorShape, Callable[[ServeError, int], dict[str, object]]] = {
    ErrorShape.NESTED: lambda error, status: {"error": _members(error, status)},
    ErrorShape.OPENAI: lambda error, status: {"error": _members(error, status, code=error.code)},
    ErrorShape.MESSAGE: lambda error, status: {"message": error.message},
    ErrorShape.VLLM: lambda error, status: {"error": _members(error, status, type=_class_of(status))},
    ErrorShape.FLAT: lambda error, status: _members(error, status, object="error", type=_class_of(status)),
}
