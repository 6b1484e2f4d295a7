"""The stages of the chain: each a pure function of sorted candidates, the rows' parameters and sums over the rest.

A stage may assume that its parameter is not neutral: the chain keeps what it says only for rows where it is active.
It drops tokens and says what it means for the tokens that are no candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from serve_app.engine.sampling.candidates import Candidates, Rest
from serve_app.engine.sampling.levels import AnyRow
from serve_app.engine.sampling.moments import Moments, Need
from serve_app.engine.sampling.parameters import Parameters

LOWEST_TEMPERATURE = 1e-6
ROUNDING = 1e-12  # a probability, or a sum of some, that misses its bound by so little has reached it


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the chain.

    on_full:   says the same of every token of a row that it is active for, and changes it
    is_active: [rows] bool, which rows it changes at all
    need:      the sums that it asks for
    drops:     whether it can drop tokens
    share:     [rows] of all probability, what candidates must hold so that they settle the row; None is any
    """

    apply: Callable[[Candidates, Parameters, Moments], Candidates]
    on_full: Callable[[AnyRow, Parameters], None]
    is_active: Callable[[Parameters], Tensor]
    need: Need = Need.NOTHING
    drops: bool = True
    share: Callable[[Parameters], Tensor] | None = None


def divide_by_temperature(candidates: Candidates, parameters: Parameters, moments: Moments) -> Candidates:
    return _divide(candidates, parameters.temperature)


def divide_by_dynamic_temperature(candidates: Candidates, parameters: Parameters, moments: Moments) -> Candidates:
    """Let the temperature follow the entropy.

    T = low + (high - low) * (H / ln n) ** exponent, with low, high = temperature ∓ range, low at least 0, and H the
    entropy of the n tokens in play (`llama_sampler_temp_ext`, after koboldcpp's). A single token is left alone.
    """
    return _divide(candidates, dynamic_temperature(parameters, moments.entropy, moments.count))


def keep_top_n_sigma(candidates: Candidates, parameters: Parameters, moments: Moments) -> Candidates:
    """Keep logits within n standard deviations of the highest (Tang et al., "Top-nσ", 2024)."""
    lowest = candidates.highest[:, 0] - parameters.top_n_sigma * moments.deviation
    return _cut(candidates, candidates.logits >= lowest[:, None], candidates.edge >= lowest)


def keep_top_k(candidates: Candidates, parameters: Parameters, moments: Moments) -> Candidates:
    """Keep the k likeliest; of equals those with lower ids."""
    return keep_first(candidates, parameters.top_k)


def keep_typical(candidates: Candidates, parameters: Parameters, moments: Moments) -> Candidates:
    """Keep the smallest set that reaches p, those whose surprise is closest to the entropy first.

    Meister et al., "Locally typical sampling", 2022. Of equally typical tokens the likelier goes first. Tokens that
    are no candidates have a surprise of at least the edge's, so they come after any candidate closer than that.
    """
    surprise = moments.log_total[:, None] - candidates.logits
    distance = (surprise - moments.entropy[:, None]).abs().masked_fill(~candidates.kept, torch.inf)
    distance, order = torch.sort(distance, dim=-1, stable=True)
    probabilities = torch.exp(-surprise).masked_fill(~candidates.kept, 0.0).gather(1, order)
    cumulated = torch.cumsum(probabilities, dim=-1)
    places = torch.arange(order.shape[-1], device=order.device)
    bound = parameters.typical_p - ROUNDING
    chosen = (cumulated - probabilities < bound[:, None]) | (places < parameters.min_keep[:, None])
    farthest = distance.masked_fill(~(chosen & (distance < torch.inf)), -torch.inf).amax(-1)
    is_full = (cumulated[:, -1] >= bound) & (candidates.num_kept >= parameters.min_keep)
    is_inside = is_full & (farthest < moments.log_total - candidates.edge - moments.entropy)
    return _cut(candidates, torch.zeros_like(chosen).scatter(1, order, chosen), ~is_inside)


def keep_top_p(candidates: Candidates, parameters: Parameters, moments: Moments) -> Candidates:
    """Keep the smallest likeliest set that reaches p (Holtzman et al., 2020); the token that crosses it stays."""
    probabilities = torch.exp(candidates.masked_logits - moments.log_total[:, None])
    cumulated = torch.cumsum(probabilities, dim=-1)
    bound = parameters.top_p - ROUNDING
    keep = cumulated - probabilities < bound[:, None]
    reaches_rest = cumulated[:, -1] < bound
    return _cut_with_min_keep(candidates, parameters, keep, reaches_rest)


def keep_min_p(candidates: Candidates, parameters: Parameters, moments: Moments) -> Candidates:
    """Keep what has at least min_p times the highest probability (Nguyen et al., 2024)."""
    lowest = candidates.highest[:, 0] + torch.log(parameters.min_p)
    keep = candidates.logits >= lowest[:, None]
    return _cut_with_min_keep(candidates, parameters, keep, candidates.edge >= lowest)


def exclude_top_choices(candidates: Candidates, parameters: Parameters, moments: Moments) -> Candidates:
    """Of the tokens at or above the threshold drop all but the least likely (XTC, Weidmann 2024).

    Nothing is dropped where fewer than min_keep tokens would stay.
    """
    lowest = torch.log(parameters.xtc_threshold) + moments.log_total - ROUNDING
    above = candidates.kept & (candidates.logits >= lowest[:, None])
    num_dropped = (above.sum(-1) - 1).clamp(min=0)
    num_dropped = torch.where(moments.count - num_dropped >= parameters.min_keep, num_dropped, 0)
    kept = candidates.kept & (candidates.ranks > num_dropped[:, None])
    has_rest = candidates.rest != Rest.GONE
    rest = torch.where(has_rest & (num_dropped > 0), Rest.PIERCED, candidates.rest)
    rest = torch.where(has_rest & (candidates.edge >= lowest), Rest.UNKNOWN, rest)
    return replace(candidates, kept=kept, rest=rest)


def dynamic_temperature(parameters: Parameters, entropy: Tensor, count: Tensor) -> Tensor:
    """The temperature at this entropy of so many tokens in play; [rows] float64 each"""
    spread = parameters.dynamic_temperature_range
    low = (parameters.temperature - spread).clamp(min=0.0)
    high = parameters.temperature + spread
    relative = (entropy / torch.log(count)).clamp(0.0, 1.0)
    temperature = low + (high - low) * relative**parameters.dynamic_temperature_exponent
    return torch.where(count > 1, temperature.clamp(min=LOWEST_TEMPERATURE), 1.0)


def keep_first(candidates: Candidates, counts: Tensor) -> Candidates:
    """Keep so many of the likeliest; counts: [rows] >= 1"""
    return _cut(candidates, candidates.ranks <= counts[:, None], candidates.num_kept < counts)


def keep_from(candidates: Candidates, lowest: Tensor) -> Candidates:
    """Keep logits of at least `lowest` [rows], and the highest in any case."""
    keep = (candidates.logits >= lowest[:, None]) | (candidates.ranks <= 1)
    return _cut(candidates, keep, (candidates.edge >= lowest) | (candidates.num_kept == 0))


def _divide(candidates: Candidates, temperature: Tensor) -> Candidates:
    return replace(
        candidates,
        logits=candidates.logits / temperature[:, None],
        edge=candidates.edge / temperature,
        divisor=candidates.divisor * temperature,
    )


def _cut_with_min_keep(
    candidates: Candidates, parameters: Parameters, keep: Tensor, reaches_rest: Tensor
) -> Candidates:
    keep = keep | (candidates.ranks <= parameters.min_keep[:, None])
    return _cut(candidates, keep, reaches_rest | (candidates.num_kept < parameters.min_keep))


def _cut(candidates: Candidates, keep: Tensor, reaches_rest: Tensor) -> Candidates:
    """Keep only these candidates and nothing of the rest, unless it reaches there."""
    outside = torch.where(reaches_rest, Rest.UNKNOWN, Rest.GONE)
    rest = torch.where(candidates.rest == Rest.GONE, Rest.GONE, outside)
    return replace(candidates, kept=candidates.kept & keep, rest=rest)
