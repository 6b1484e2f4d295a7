"""What is to be generated: sampling, stopping, logprobs, constraints, context and recordings, all checked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from secrets import token_bytes
from typing import Literal, get_args

from serve_app.core.delta import Delta
from serve_app.core.names import ModelRef
from serve_app.core.prompt import Conversation, Infill, Prompt
from serve_app.core.shares import Share

Pooling = Literal["mean", "last", "first", "max", "mean_sqrt", "weighted_mean"]
"""Which vector is made of a prompt's hidden states: their mean; one of them; of each number the highest; their sum
divided by the root of how many they are; their mean, weighted by their places."""
HiddenStates = Literal["drawn", "all"] | Pooling
"""Of the positions that are computed, which is all but the last generated token: the last one; those that a token was
drawn from, or the prompt's last where none was; all of them; one vector of the prompt's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingForm:
    """How a model embeds a text, which is closed with the tokens that its tokenizer puts behind a text.

    normalizes:  the vector is divided by its length
    max_tokens:  of an input; None is as many as the context has
    lowers_case: of an input's letters
    reason:      why there are none; None where there are
    """

    pooling: Pooling = "mean"
    normalizes: bool = True
    max_tokens: int | None = None
    lowers_case: bool = False
    reason: str | None = None


Activation = Literal["sigmoid", "softmax", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadForm(EmbeddingForm):
    """How a classification head reads a text, or a pair of texts: a score for each label, from the last token's state.

    labels:       in the order of the logits
    activation:   makes scores of the logits
    pad_token_id: is not read at the end of a text; None if the model has none
    """

    pooling: Pooling = "last"
    normalizes: bool = False
    labels: tuple[str, ...]
    activation: Activation
    pad_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordParams:
    """What is wanted of each completion of a request, with its end.

    hidden_states: of which positions; None is of none
    echoed:        where all are wanted, so many last tokens of the prompt; 0 is the whole prompt
    experts:       the experts that every position was sent to, at every layer
    name:          of the parameter that asked for it, as the client knows it, for refusals
    dimensions:    the one vector that is wanted is cut to so many numbers; None leaves it whole
    embedding:     the prompt is an input that is embedded, or read by a head, so; None is a prompt like any other
    """

    hidden_states: HiddenStates | None = None
    echoed: int = 0
    experts: bool = False
    name: str = ""
    dimensions: int | None = None
    embedding: EmbeddingForm | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParams:
    """What is done where prompt and completion do not fit the model's context.

    truncates_prompt:     a prompt that leaves no room loses its beginning, to half of the context at most where the
                          completion has no limit or may be shortened; otherwise it is refused
    max_prompt_tokens:    of any prompt so many tokens are kept; None is all, 0 what the completion leaves of it
    keeps_beginning:      those are its first ones, not its last
    shortens_completion:  fewer tokens are generated; otherwise the request is refused
    prompt_name, max_tokens_name: what the client called its prompt and its limit, for refusals
    """

    truncates_prompt: bool = False
    max_prompt_tokens: int | None = None
    keeps_beginning: bool = False
    shortens_completion: bool = True
    prompt_name: str = "prompt"
    max_tokens_name: str = "max_tokens"

    @property
    def takes_any_length(self) -> bool:
        """Whether a prompt of any length may come to fit."""
        return self.truncates_prompt or self.max_prompt_tokens is not None

    def num_wanted(self, num_tokens: int, *, max_tokens: int | None, max_model_len: int) -> int:
        """Return how many of a prompt's tokens are wanted, whether they fit or not."""
        most = self.max_prompt_tokens
        if most is None:
            return num_tokens
        if most:
            return min(num_tokens, most)
        if max_tokens is not None:
            return min(num_tokens, max(1, max_model_len - max_tokens))
        return num_tokens if num_tokens < max_model_len else max(1, max_model_len // 2)

    def num_kept(self, num_tokens: int, *, max_tokens: int | None, max_model_len: int) -> int:
        """Return how many of a prompt's tokens stay: all, unless the prompt leaves no room and may be cut.

        The last `context - max_tokens` tokens stay. Where the completion has no limit, or may be shortened, at least
        half of the context stays the prompt's; otherwise at least one token.
        """
        if not self.truncates_prompt or not leaves_no_room(num_tokens, max_tokens, max_model_len=max_model_len):
            return num_tokens
        least = max_model_len // 2 if self.shortens_completion or max_tokens is None else 0
        room = 0 if max_tokens is None else max_model_len - max_tokens
        return min(num_tokens, max(1, least, room))


def leaves_no_room(num_tokens: int, max_tokens: int | None, *, max_model_len: int) -> bool:
    """Return whether a prompt of so many tokens leaves no room for a completion."""
    room = max_model_len - num_tokens
    return room < 0 or (room == 0 and max_tokens != 0)


ConstraintKind = Literal[
    "json_schema", "compact_json", "regex", "choice", "gbnf", "lark", "llguidance", "structural_tag", "tools"
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """One language that the text is to be of; nothing of it was checked but its form.

    kind:   what the source is written in; json_schema, llguidance, structural_tag and tools are JSON, compact_json is a
            schema of JSON without white space, choice a list of texts in JSON, of which the text is one
    source: text that the whole completion has to follow
    name:   the parameter it came in, as the client spelled it, for refusals
    """

    kind: ConstraintKind
    source: str
    name: str

    @property
    def digest(self) -> bytes:
        """The same for what means the same, whatever it was called."""
        return sha256(f"{self.kind}\0{self.source}".encode()).digest()


SamplerName = Literal[
    "penalties", "dry", "temperature", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"
]  # fmt: skip
TEMPERATURE_FIRST: tuple[SamplerName, ...] = get_args(SamplerName)
TEMPERATURE_LAST: tuple[SamplerName, ...] = (*(n for n in TEMPERATURE_FIRST if n != "temperature"), "temperature")


def samplers_in_order(sent: tuple[SamplerName, ...] | None, *, is_temperature_last: bool) -> tuple[SamplerName, ...]:
    """Return the samplers that were sent, else all of them in one of the two usual orders."""
    if sent is not None:
        return sent
    return TEMPERATURE_LAST if is_temperature_last else TEMPERATURE_FIRST


DRY_BASE = 1.75
DRY_ALLOWED_LENGTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DryParams:
    """Lowers the logit of tokens that would continue a repetition ("don't repeat yourself").

    A token that would continue a repeated run of m tokens loses multiplier * base ** (m - allowed_length).

    multiplier:     0 switches it off
    allowed_length: shorter runs are free
    window:         it sees so many last tokens of prompt and output; None is all of them
    breakers:       token sequences, in text order, across which no run is followed
    """

    multiplier: float
    base: float = DRY_BASE
    allowed_length: int = DRY_ALLOWED_LENGTH
    window: int | None = None
    breakers: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Neutral values switch a part off.

    temperature: below 1e-6 is greedy, whatever else is set; otherwise the logits are divided by it
    top_k:       keep the k likeliest tokens; 0 keeps all
    top_p:       keep the smallest likeliest set whose probability reaches top_p; 1 keeps all, 0 the likeliest alone
    min_p:       keep tokens with at least min_p times the probability of the likeliest; 0 keeps all
    seed:        64 bits; with the prompt's index, the sample and the position it decides every draw
    typical_p:   keep the smallest set of tokens, those of the most typical surprise first, that reaches it; 1 keeps all
    top_n_sigma: keep logits within so many standard deviations of the highest; 0 keeps all
    min_keep:    typ_p, top_p, min_p and xtc leave at least so many tokens, and never less than one

    xtc_probability, xtc_threshold: with this probability per token, of all tokens at or above the threshold only the
                 least likely stays; probability 0 or a threshold above 0.5 is off
    dynamic_temperature_range, dynamic_temperature_exponent: the temperature moves within temperature ± range with the
                 entropy (relative to the highest possible one) to the power of the exponent; range 0 is off
    mirostat:    1 or 2: after temperature this version takes the place of all other samplers; 0 is off
    mirostat_tau, mirostat_eta: target surprise in bits; learning rate
    samplers:    what runs, in this order. `penalties` and `dry` edit logits and so must stand before the others

    repetition_penalty: > 0; divides positive logits of tokens seen and multiplies negative ones; 1 is off
    presence_penalty, frequency_penalty: taken from the logit of tokens seen, once and per occurrence; 0 is off
    penalty_window: all three see so many last tokens of prompt and output, 0 sees none; None: repetition sees prompt
                 and output, the other two the output
    repetition_sees_prompt: False: repetition, too, sees the output alone (without a window)
    logit_bias:  (token id, addend), -inf bans; addends to one token add up
    allowed_token_ids: no other token is ever drawn; none is no such bound
    bad_words:   token sequences; the last token of each is banned behind the others, where all of them were generated
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    min_keep: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynamic_temperature_range: float = 0.0
    dynamic_temperature_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    samplers: tuple[SamplerName, ...] = TEMPERATURE_FIRST
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int | None = None
    repetition_sees_prompt: bool = True
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    dry: DryParams | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class StopParams:
    """When a sequence ends.

    max_tokens: at most so many generated tokens; None is until the context ends; 0 computes the prompt only
    strings:    end where the earliest of these begins in the generated text; none is empty
    token_ids:  end at any of these tokens
    min_tokens: before so many are generated, no token that would end it is drawn and stop strings are ordinary text
    ignore_eos: the model's own end tokens do not end it; they may be drawn and their text is as any token's
    patterns:   regular expressions; end where the earliest match of one of them begins in the generated text
    max_predict_s: end at the first line break that comes so long after the first token; 0 is no such limit
    shows_string: the stop string or the stop token that ended it stays in the text, and nothing after it
    shows_pattern: so does what a pattern matched
    """

    max_tokens: int | None = 16
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    patterns: tuple[str, ...] = ()
    max_predict_s: float = 0.0
    shows_string: bool = False
    shows_pattern: bool = False

    def after(self, seconds: float) -> StopParams:
        """Return what is left of them so long after the first token."""
        left_s = max(1e-6, self.max_predict_s - seconds)  # zero would be no limit
        return replace(self, max_predict_s=left_s) if seconds and self.max_predict_s else self


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobParams:
    """Which log-probabilities are reported, of the raw distribution unless said otherwise.

    top:    so many likeliest tokens beside the chosen one, per position; None reports no generated token
    prompt: also of the prompt's own tokens that are echoed; always raw
    whole_prompt: so many likeliest tokens, with ranks, at every position of the prompt, echoed or not; None is none
    post_sampling: those of generated tokens are of the distribution that they were drawn from, dropped tokens left out
    """

    top: int | None = 0
    prompt: bool = False
    whole_prompt: int | None = None
    post_sampling: bool = False

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's own tokens are scored."""
        return self.prompt or self.whole_prompt is not None

    @property
    def prompt_top(self) -> int:
        """Likeliest tokens that are looked for at a position of the prompt."""
        echoed = self.top or 0 if self.prompt else 0
        return max(echoed, self.whole_prompt or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnencodedParams:
    """Parameters in text that only the model's tokenizer can turn into token ids.

    logit_bias:   (text, addend); each of its tokens gets the addend
    dry_breakers: texts across which DRY follows no run
    bad_words:    texts that are not generated, at the beginning of a text, behind a letter, and as a word of its own
    """

    logit_bias: tuple[tuple[str, float], ...] = ()
    dry_breakers: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """A completion that was begun elsewhere, and goes on behind these tokens.

    token_ids: generated so far; nothing of them is told again
    mu:        Mirostat's bound behind them; None without Mirostat
    num_counted: tokens, these among them, that replicas have counted for its tenant: they are not counted again
    """

    token_ids: tuple[int, ...] = ()
    mu: float | None = None
    num_counted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A client's stream as it was asked for, so that any router can go on with it.

    id:          of the response, as its client reads it;  response_id: as the ledger does
    created:     Unix seconds
    owner:       the id of the key that it is for
    path, dialect, body: of the request as it came;  seed: that was drawn for it, or sent
    models:      of its parts, in order
    seconds:     for which it is kept once nothing more of it is computed
    secret:      signs the ids of its events
    """

    id: str = ""
    response_id: str = ""
    created: int
    owner: str
    path: str
    dialect: str
    body: bytes
    seed: int | None
    models: tuple[ModelRef, ...] = ()
    seconds: float
    secret: bytes = field(default_factory=partial(token_bytes, 16), repr=False)

    @property
    def num_parts(self) -> int:
        """Prompts that it has in all, those for several models counted for each."""
        return len(self.models)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt of a client's request with everything needed to complete it `n` times.

    request_id:   unique in the cluster;  client_request_id: of the client's request, as the client and logs know it
    prompt_index: which of the client's prompts this is; part of the key of every random draw
    echo:         the first delta carries the prompt's text;  echo_last: of so many last tokens only, 0 is all of it
    reports_prompt_ids: the first delta carries the prompt's token ids;  reports_tail: the end of its text
    uses_cache:   prefixes computed before may be used;  cache_salt: of those who find them, constraints and images too
    skips_special_tokens: tokens like the end of text are not shown
    shown_marks:  special tokens whose names are part of one of these are shown even so, within the text
    constraint:   what each completion has to be; None is any text
    infill:       what stands behind the gap that the prompt stands before; None where there is no gap
    conversation: from which the prompt is rendered; the prompt is empty until then
    is_read_whole: the client reads a completion only at its end, so deltas may be gathered
    record:       which recordings of the computation are wanted; None is none
    prediction:   the expected completion, text or token ids; it changes only what is drafted
    share:        its flow, weight and priority; they change only when it is computed
    continued:    by sample, where each was begun elsewhere; None for one that has ended there. () begins all here
    is_reported:  what is told of the prompt was told already
    kept:         the stream that it is of, for its replica to keep; None keeps nothing
    past:         of a stream that is kept, what was told before this replica had it
    """

    request_id: str
    model: ModelRef
    prompt: Prompt
    prompt_index: int = 0
    n: int = 1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopParams = field(default_factory=StopParams)
    logprobs: LogprobParams | None = None
    echo: bool = False
    echo_last: int = 0
    reports_prompt_ids: bool = False
    uses_cache: bool = True
    cache_salt: str = ""
    skips_special_tokens: bool = True
    shown_marks: tuple[str, ...] = ()
    constraint: Constraint | None = None
    conversation: Conversation | None = None
    reports_tail: bool = False
    is_read_whole: bool = False
    record: RecordParams | None = None
    context: ContextParams = field(default_factory=ContextParams)
    unencoded: UnencodedParams = field(default_factory=UnencodedParams)
    infill: Infill | None = None
    prediction: str | tuple[int, ...] = ""
    share: Share = field(default_factory=Share)
    client_request_id: str = ""
    continued: tuple[Continued | None, ...] = ()
    is_reported: bool = False
    kept: Kept | None = None
    past: tuple[Delta, ...] = ()

    @property
    def part(self) -> int:
        """Which of the prompts of its response it is, as its id says."""
        return int(self.request_id.split("/")[1])

    @property
    def samples(self) -> tuple[int, ...]:
        """Which of its completions are to be computed."""
        ended = {sample for sample, each in enumerate(self.continued) if each is None}
        return tuple(sample for sample in range(self.n) if sample not in ended)

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text that is cut into tokens for the model to read."""
        of_prompt = tuple(part for part in self.prompt.parts if isinstance(part, str))
        return of_prompt if self.infill is None else (*of_prompt, *self.infill.texts)

    @property
    def num_chars(self) -> int:
        """Characters of them together."""
        return sum(map(len, self.texts))
