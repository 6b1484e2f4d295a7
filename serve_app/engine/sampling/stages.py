"""The sampler chain: stages that divide logits or drop tokens, in the order that a request gives.

A stage is a function of the tokens in play, the rows' parameters and sums over each row's distribution. The tokens are
the sorted candidates of many rows, or all of one row: either knows how to keep some. `STAGES` is the table of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields
from functools import cached_property
from math import inf, log, log2, nan
from operator import attrgetter
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from serve_app.core.request import SamplingParams
from serve_app.engine.decoder.memory import sent
from serve_app.engine.sampling.candidates import (
    Candidates,
    WholeRow,
    block_weights,
    few_at_once,
    row_sums,
)
from serve_app.engine.sampling.noise import Stream, key, keys_tensor, uniform
from serve_app.engine.scheduler.sequence import Sequence

Tokens = TypeVar("Tokens", Candidates, WholeRow)

LOWEST_TEMPERATURE = 1e-6
ROUNDING = 1e-12  # a probability, or a sum of some, that misses its bound by so little has reached it
NO_WEIGHT = 800.0  # nats below the highest at which a float64 exponential is 0
NUM_ESTIMATED = 100  # so many likeliest tokens give Mirostat 1 its estimate of the distribution's shape
XTC_HIGHEST_THRESHOLD = 0.5  # above it no two tokens can reach it

_NAMES = tuple(
    field.name for field in fields(SamplingParams) if type(field.default) in (int, float) and field.name != "seed"
)
_numbers_of = attrgetter(*_NAMES)
_PLACES = {name: place for place, name in enumerate((*_NAMES, "xtc_applies", "mu"))}


@dataclass(frozen=True, slots=True)
class Parameters:
    """The sampling parameters of several rows side by side.

    Each number of `SamplingParams` is an attribute of that name, [rows] float64. Beside them are `mu`, the state of
    Mirostat, and `xtc_applies`, 1 where this draw is one of those that XTC changes.

    table: [attributes, rows] float64
    keys:  [rows] int64, what decides the draws
    """

    table: Tensor
    keys: Tensor

    @classmethod
    def of_sequences(cls, sequences: Items[Sequence], device: torch.device) -> Parameters:
        """Read the parameters of the next draw of each sequence."""
        rows = [(*_numbers_of(each.request.sampling), _xtc_applies(each), each.sampling_state.mu) for each in sequences]
        table = torch.tensor(rows, dtype=torch.float64).view(len(rows), len(_PLACES)).t().contiguous()
        table[_PLACES["min_keep"]].clamp_(min=1.0)
        keys = keys_tensor([_token_key(each) for each in sequences], table.device)
        return cls(table, keys).sent(device)

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.table[_PLACES[name]]
        except KeyError:
            raise AttributeError(name) from None

    def of(self, rows: Tensor) -> Parameters:
        """Return those of these rows [n]."""
        return Parameters(self.table.index_select(1, rows), self.keys.index_select(0, rows))

    def sent(self, device: torch.device) -> Parameters:
        """Copy the host's own to the device, in one copy."""
        if device.type == "cpu":
            return self
        there = sent(torch.cat((self.table.view(torch.int64), self.keys[None])), device)
        return Parameters(there[:-1].view(torch.float64), there[-1])


def _xtc_applies(sequence: Sequence) -> bool:
    params = sequence.request.sampling
    if params.xtc_probability <= 0.0 or params.xtc_threshold > XTC_HIGHEST_THRESHOLD:
        return False
    return uniform(params.seed, **_place(sequence), stream=Stream.XTC) < params.xtc_probability


def _token_key(sequence: Sequence) -> int:
    params = sequence.request.sampling
    return key(params.seed, **_place(sequence), stream=Stream.MIROSTAT if params.mirostat else Stream.TOKEN)


def _place(sequence: Sequence) -> dict[str, int]:
    """Say where in the client's request a draw is made."""
    return {
        "prompt_index": sequence.request.prompt_index,
        "sample": sequence.sample,
        "position": sequence.num_tokens,
    }


def weights_of(tokens: Candidates | WholeRow) -> Tensor:
    """Return what is proportional to the tokens' probabilities, [rows, k]; 0 where not in play."""
    if isinstance(tokens, WholeRow) and tokens.weights is not None:
        return tokens.weights
    masked = tokens.masked_logits
    return masked.sub_(masked.amax(-1, keepdim=True)).exp_() if masked.shape[-1] else masked


class Sums:
    """Sums over the tokens in play of each row, made when a stage asks for them.

    `whole` are rows of which no stage has dropped a token: their sums run over the vocabulary, [rows, vocab] float32 as
    it came to the chain. Those of all others run over the candidates in play. Each sum is [rows] float64.
    """

    def __init__(self, candidates: Candidates | WholeRow, logits: Tensor, whole: Items[int]) -> None:
        self._candidates = candidates
        self._logits = logits
        self._whole = list(whole)

    @cached_property
    def _masked(self) -> Tensor:
        return self._candidates.masked_logits

    @cached_property
    def highest(self) -> Tensor:
        """The highest logit in play, of a candidate."""
        return self._masked.amax(-1)

    @cached_property
    def weights(self) -> Tensor:
        """[rows, k] of the candidates, exp(logit - highest), 0 where not in play."""
        if not self._masked.shape[-1]:
            return self._masked
        return (self._masked - self.highest[:, None]).exp_()

    @cached_property
    def count(self) -> Tensor:
        """The number of tokens in play."""
        return self._with_whole(
            self._candidates.num_kept.double(), lambda own, _: (own > -inf).sum(-1, dtype=torch.float64)
        )

    @cached_property
    def log_total(self) -> Tensor:
        """ln of the sum of exponentials of the logits: a logit less this is a log-probability."""
        return self._put(self._own_total, self._whole_totals()) if self._whole else self._own_total

    @cached_property
    def entropy(self) -> Tensor:
        """In nats."""
        logprobs = (self._masked - self._own_total[:, None]).clamp_(min=-NO_WEIGHT)
        terms = torch.exp(logprobs).mul_(logprobs)
        return self._with_whole(-terms.cumsum_(-1)[:, -1] if terms.shape[-1] else self._own_total, self._entropy_of)

    @cached_property
    def deviation(self) -> Tensor:
        """The standard deviation (of the population) of the logits."""
        return self._with_whole(_deviation(self._masked), lambda own, divisor: _deviation(own.double()) / divisor)

    @cached_property
    def _own_total(self) -> Tensor:
        """`log_total` of the candidates alone; nan where there are none."""
        if not self.weights.shape[-1]:
            return torch.full_like(self._candidates.divisor, nan)
        return self.highest + torch.log(torch.cumsum(self.weights, dim=-1)[:, -1])

    def _whole_totals(self) -> Tensor:
        """Add the candidates up in float64, the others in float32, in a quarter of the time."""
        assert isinstance(self._candidates, Candidates), "a whole row has no others"
        there = sent(torch.tensor(self._whole), self._logits.device)
        ids, divisor = self._candidates.token_ids[there], self._candidates.divisor[there]
        sums, highest = block_weights(self._logits, self._whole, divisor, without=ids)
        own = self._candidates.logits[there] - (highest.double() / divisor)[:, None]
        total = torch.cumsum(torch.cat((torch.exp(own), sums), dim=-1), dim=-1)[:, -1]
        return highest.double() / divisor + torch.log(total)

    def _entropy_of(self, own: Tensor, divisor: Tensor) -> Tensor:
        scaled = own.double().div_(divisor[:, None])
        scaled.sub_(scaled.amax(-1, keepdim=True)).clamp_(min=-NO_WEIGHT)
        weights = torch.exp(scaled)
        total = row_sums(weights)
        return torch.log(total) - row_sums(weights.mul_(scaled)) / total

    def _with_whole(self, sums: Tensor, of_whole: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Put what a function of logits and divisors says of the whole rows into the sums of the candidates."""
        if not self._whole:
            return sums
        divisor = self._candidates.divisor[sent(torch.tensor(self._whole), self._logits.device)]
        parts = [of_whole(own, divisor[part]) for part, own in few_at_once(self._logits, self._whole)]
        return self._put(sums, torch.cat(parts))

    def _put(self, sums: Tensor, of_whole: Tensor) -> Tensor:
        return sums.index_copy(0, sent(torch.tensor(self._whole), sums.device), of_whole)


def _deviation(values: Tensor) -> Tensor:
    """Return the deviation of each row of logits; -inf is out of play."""
    outside = values == -inf
    count = values.shape[-1] - outside.sum(-1)
    mean = row_sums(values.masked_fill(outside, 0.0)) / count
    squares = (values - mean[:, None]).square_().masked_fill_(outside, 0.0)
    return torch.sqrt(row_sums(squares) / count)


class Apply(Protocol):
    """Says of each row, as if the stage were active there, what it leaves in play."""

    def __call__(self, tokens: Tokens, parameters: Parameters, sums: Sums, /) -> Tokens: ...


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the chain.

    is_active: [rows] bool, which rows it changes at all
    drops:     whether it can drop tokens
    """

    apply: Apply
    is_active: Callable[[Parameters], Tensor]
    drops: bool = True


def run_chain(
    candidates: Candidates,
    chain: Items[Stage],
    parameters: Parameters,
    logits: Tensor,
    *,
    own: Parameters | None = None,
) -> Candidates:
    """Apply the stages one after the other, each to the rows where it is active; looks at no number of a device.

    A row behind a stage that drops is GONE, where nothing but candidates is left of it, or UNKNOWN.

    logits: [rows, vocab] float32, those that the candidates were chosen from
    own:    the same parameters in the host's memory
    """
    own = own or parameters
    has_dropped = torch.zeros(len(own.keys), dtype=torch.bool)
    has_rest = candidates.logits.shape[-1] < logits.shape[-1]
    for stage in chain:
        is_active = stage.is_active(own)
        if not is_active.any():
            continue
        whole = torch.nonzero(is_active & ~has_dropped)[:, 0].tolist() if has_rest else []
        changed = stage.apply(candidates, parameters, Sums(candidates, logits, whole))
        is_everywhere = bool(is_active.all())
        candidates = changed if is_everywhere else candidates.merged(stage.is_active(parameters), changed)
        if stage.drops:
            has_dropped |= is_active
    return candidates


def run_whole_chain(logits: Tensor, chain: Items[Stage], parameters: Parameters) -> WholeRow:
    """Apply the chain to every token of one row; the host looks at each stage.

    logits: [1, vocab] float32;  parameters: of one row
    """
    row = WholeRow.of_logits(logits)
    for stage in chain:
        if bool(stage.is_active(parameters)[0]):
            row = stage.apply(row, parameters, Sums(row, logits, ()))
    return row


def order_of(params: SamplingParams) -> tuple[str, ...]:
    """Name the stages that these parameters run, in their order."""
    if params.mirostat:
        return ("temperature", f"mirostat_{params.mirostat}")
    return tuple(name for name in params.samplers if name in STAGES)


def stages_of(order: Items[str]) -> list[Stage]:
    """Return the stages of these names."""
    return [stage for name in order for stage in STAGES[name]]


def can_drop(chain: Items[Stage], parameters: Parameters) -> Tensor:
    """Say of which rows any stage can drop a token, [rows] bool."""
    drops = torch.zeros(len(parameters.keys), dtype=torch.bool)
    for stage in chain:
        if stage.drops:
            drops |= stage.is_active(parameters)
    return drops


def divide_by_temperature(tokens: Tokens, parameters: Parameters, sums: Sums) -> Tokens:
    """Divide the logits by the temperature."""
    return tokens.divide(parameters.temperature)


def divide_by_dynamic_temperature(tokens: Tokens, parameters: Parameters, sums: Sums) -> Tokens:
    """Let the temperature follow the entropy.

    T = low + (high - low) * (H / ln n) ** exponent, with low, high = temperature ∓ range, low at least 0, and H the
    entropy of the n tokens in play (`llama_sampler_temp_ext`, after koboldcpp's). A single token is left alone.
    """
    spread = parameters.dynamic_temperature_range
    low = (parameters.temperature - spread).clamp(min=0.0)
    high = parameters.temperature + spread
    relative = (sums.entropy / torch.log(sums.count)).clamp(0.0, 1.0)
    temperature = low + (high - low) * relative**parameters.dynamic_temperature_exponent
    return tokens.divide(torch.where(sums.count > 1, temperature.clamp(min=LOWEST_TEMPERATURE), 1.0))


def keep_top_n_sigma(tokens: Tokens, parameters: Parameters, sums: Sums) -> Tokens:
    """Keep logits within n standard deviations of the highest (Tang et al., "Top-nσ", 2024)."""
    lowest = sums.highest - parameters.top_n_sigma * sums.deviation
    return tokens.keep_from(lowest, torch.zeros_like(lowest))


def keep_top_k(tokens: Tokens, parameters: Parameters, sums: Sums) -> Tokens:
    """Keep the k likeliest; of equals those with lower ids."""
    return tokens.keep_first(parameters.top_k)


def keep_typical(tokens: Tokens, parameters: Parameters, sums: Sums) -> Tokens:
    """Keep the smallest set that reaches p, those whose surprise is closest to the entropy first.

    Meister et al., "Locally typical sampling", 2022. Of equally typical tokens the likelier goes first.
    """
    return tokens.keep_typical(sums.log_total, sums.entropy, parameters.typical_p - ROUNDING, parameters.min_keep)


def keep_top_p(tokens: Tokens, parameters: Parameters, sums: Sums) -> Tokens:
    """Keep the smallest likeliest set that reaches p (Holtzman et al., 2020); the token that crosses it stays."""
    bound = (parameters.top_p - ROUNDING) * torch.exp(sums.log_total - sums.highest)
    return tokens.keep_until(sums.weights, bound, parameters.min_keep)


def keep_min_p(tokens: Tokens, parameters: Parameters, sums: Sums) -> Tokens:
    """Keep what has at least min_p times the highest probability (Nguyen et al., 2024)."""
    return tokens.keep_from(sums.highest + torch.log(parameters.min_p), parameters.min_keep)


def exclude_top_choices(tokens: Tokens, parameters: Parameters, sums: Sums) -> Tokens:
    """Of the tokens at or above the threshold drop all but the least likely (XTC, Weidmann 2024).

    Nothing is dropped where fewer than min_keep tokens would stay.
    """
    lowest = torch.log(parameters.xtc_threshold) + sums.log_total - ROUNDING
    num_dropped = (tokens.count_from(lowest) - 1).clamp(min=0)
    return tokens.drop_first(torch.where(tokens.num_kept - num_dropped >= parameters.min_keep, num_dropped, 0))


def keep_by_zipf(tokens: Tokens, parameters: Parameters, sums: Sums) -> Tokens:
    """Estimate the exponent of Zipf's law and keep as many tokens as give the wanted surprise (Mirostat 1).

    Basu et al., "Mirostat: a neural text decoding algorithm that directly controls perplexity", ICLR 2021; as
    llama.cpp has both versions, surprise in bits.
    """
    vocab = sums.count
    exponent = zipf_exponent(*tokens.first(NUM_ESTIMATED))
    counts = torch.minimum(zipf_count(exponent, parameters.mu, vocab), vocab)
    return tokens.keep_first(counts, known=torch.maximum(counts, vocab.clamp(max=NUM_ESTIMATED)))


def keep_by_surprise(tokens: Tokens, parameters: Parameters, sums: Sums) -> Tokens:
    """Keep the tokens whose surprise is at most mu bits, and the likeliest in any case (Mirostat 2)."""
    lowest = sums.log_total - parameters.mu * log(2.0)
    return tokens.keep_from(lowest, torch.ones_like(lowest))


def zipf_exponent(logits: Tensor, kept: Tensor) -> Tensor:
    """Fit ln(p_i / p_{i+1}) = s * ln((i+2) / (i+1)) by least squares; [rows], nan where there is one token.

    logits: [rows, n] float64, the highest ones by falling value; kept: [rows, n] bool, whether in play
    """
    is_pair = kept[:, 1:]
    ranks = torch.arange(1, logits.shape[-1], dtype=torch.float64, device=logits.device)
    steps = torch.log((ranks + 1) / ranks).expand_as(is_pair)
    falls = (logits[:, :-1] - logits[:, 1:]).masked_fill(~is_pair, 0.0)
    products = torch.cat((torch.zeros_like(logits[:, :1]), steps * falls), dim=-1)
    squares = torch.cat((torch.zeros_like(logits[:, :1]), (steps**2).masked_fill(~is_pair, 0.0)), dim=-1)
    return torch.cumsum(products, dim=-1)[:, -1] / torch.cumsum(squares, dim=-1)[:, -1]


def zipf_count(exponent: Tensor, mu: Tensor, vocab: Tensor) -> Tensor:
    """Return ((eps 2^mu) / (1 - N^-eps)) ^ (1/s) with eps = s - 1, in its limit where eps is 0; at least 1, whole."""
    excess = exponent - 1.0
    shrink = torch.where(excess.abs() < 1e-9, 1.0 / torch.log(vocab), excess / (1.0 - vocab**-excess))
    counts = (shrink * 2.0**mu) ** (1.0 / exponent)
    return torch.nan_to_num(counts, nan=1.0, posinf=2.0**53).floor().clamp(1.0, 2.0**53)


def next_mu(mu: float, probability: float, *, tau: float, eta: float) -> float:
    """Move mu against the error of the last token's surprise; probability is among the tokens kept."""
    return mu - eta * (-log2(probability) - tau)


def steer(sequence: Sequence, probability: float) -> None:
    """Carry Mirostat on over a token that had this probability; greedy sequences have no Mirostat."""
    params, state = sequence.request.sampling, sequence.sampling_state
    if params.mirostat and not params.is_greedy:
        state.mu = next_mu(state.mu, probability, tau=params.mirostat_tau, eta=params.mirostat_eta)


STAGES: Mapping[str, tuple[Stage, ...]] = {
    "temperature": (
        Stage(
            divide_by_temperature,
            lambda p: (p.dynamic_temperature_range == 0.0) & (p.temperature != 1.0),
            drops=False,
        ),
        Stage(divide_by_dynamic_temperature, lambda p: p.dynamic_temperature_range > 0.0, drops=False),
    ),
    "top_n_sigma": (Stage(keep_top_n_sigma, lambda p: p.top_n_sigma > 0.0),),
    "top_k": (Stage(keep_top_k, lambda p: p.top_k > 0.0),),
    "typ_p": (Stage(keep_typical, lambda p: p.typical_p < 1.0),),
    "top_p": (Stage(keep_top_p, lambda p: p.top_p < 1.0),),
    "min_p": (Stage(keep_min_p, lambda p: p.min_p > 0.0),),
    "xtc": (Stage(exclude_top_choices, lambda p: p.xtc_applies > 0.0),),
    "mirostat_1": (Stage(keep_by_zipf, lambda p: torch.isfinite(p.mu)),),
    "mirostat_2": (Stage(keep_by_surprise, lambda p: torch.isfinite(p.mu)),),
}
