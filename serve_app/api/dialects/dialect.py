"""What a dialect may decide: defaults, contradictory meanings, a few limits, and how an error is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from serve_app.api.limits import INT32_MAX

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


def frozen(table: Mapping[str, object]) -> Mapping[str, object]:
    return MappingProxyType(dict(table))


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
    defaults: Mapping[str, object] = field(default_factory=lambda: frozen({}))
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
    statuses: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def least_max_tokens(self) -> int:
        """The lower end of `max_tokens`; a dialect that takes -1 takes 0, too."""
        if self.takes_unlimited_tokens:
            return UNLIMITED
        return 0 if self.takes_zero_tokens else 1

    def status_of(self, *, status: int, code: str) -> int:
        """The HTTP status of an error in this dialect."""
        return self.statuses.get(code, self.statuses.get(str(status), status))
