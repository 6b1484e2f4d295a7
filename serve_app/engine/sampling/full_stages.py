"""The stages of the chain on full rows: what `stages` and `mirostat` say of candidates, said of every token.

Each changes the rows it is given, all of which it must be active for.
"""

from __future__ import annotations

from math import inf, log

import torch
from torch import Tensor

from serve_app.engine.sampling.candidates import largest
from serve_app.engine.sampling.full import FullRows
from serve_app.engine.sampling.mirostat import NUM_ESTIMATED, zipf_count, zipf_exponent
from serve_app.engine.sampling.parameters import Parameters
from serve_app.engine.sampling.selection import keep_until
from serve_app.engine.sampling.stages import ROUNDING, dynamic_temperature
from serve_app.engine.sampling.whole import at_least, row_sums


def divide_by_temperature(rows: FullRows, parameters: Parameters) -> None:
    rows.divide(parameters.temperature)


def divide_by_dynamic_temperature(rows: FullRows, parameters: Parameters) -> None:
    rows.divide(dynamic_temperature(parameters, rows.entropy, rows.num_kept))


def keep_top_n_sigma(rows: FullRows, parameters: Parameters) -> None:
    rows.keep_from(rows.highest - parameters.top_n_sigma * rows.deviation)


def keep_top_k(rows: FullRows, parameters: Parameters) -> None:
    rows.keep(rows.first(rows.kept, parameters.top_k.double()))


def keep_typical(rows: FullRows, parameters: Parameters) -> None:
    """Those of the most typical surprise first; of equals the likelier."""
    nearness = -(rows.log_total[:, None] - rows.scaled - rows.entropy[:, None]).abs_()
    bound = (parameters.typical_p - ROUNDING) * row_sums(rows.weights)
    mask = keep_until(nearness, rows.weights, bound, ties=rows.logits)
    if _too_few(rows, mask, parameters):
        mask = torch.maximum(mask, keep_until(nearness, rows.kept, parameters.min_keep.double(), ties=rows.logits))
    rows.keep_any(mask)


def keep_top_p(rows: FullRows, parameters: Parameters) -> None:
    bound = (parameters.top_p - ROUNDING) * row_sums(rows.weights)
    _keep_with_min_keep(rows, rows.first(rows.weights, bound), parameters)


def keep_min_p(rows: FullRows, parameters: Parameters) -> None:
    lowest = rows.highest + torch.log(parameters.min_p)
    _keep_with_min_keep(rows, at_least(rows.scaled, lowest), parameters)


def exclude_top_choices(rows: FullRows, parameters: Parameters) -> None:
    """The least likely of the top choices is the last of its equals."""
    above = at_least(rows.scaled, torch.log(parameters.xtc_threshold) + rows.log_total).mul_(rows.kept)
    num_dropped = row_sums(above) - 1.0
    applies = (num_dropped > 0) & (rows.num_kept - num_dropped >= parameters.min_keep)
    lowest = torch.where(above > 0, rows.scaled, inf).amin(-1)
    is_lowest = (rows.scaled == lowest[:, None]) & (above > 0)
    ids = torch.arange(above.shape[-1], device=above.device)
    last = (is_lowest * ids).amax(-1, keepdim=True)
    mask = (1.0 - above).scatter_(1, last, 1.0)
    rows.keep_any(torch.where(applies[:, None], mask, 1.0))


def keep_by_zipf(rows: FullRows, parameters: Parameters) -> None:
    """Mirostat 1."""
    values = largest(rows.logits, min(NUM_ESTIMATED, rows.logits.shape[-1]))
    likeliest = values.double() / rows.divisor[:, None]
    vocab = rows.num_kept
    counts = torch.minimum(zipf_count(zipf_exponent(likeliest, likeliest > -inf), parameters.mu, vocab), vocab)
    rows.keep(rows.first(rows.kept, counts))


def keep_by_surprise(rows: FullRows, parameters: Parameters) -> None:
    """Mirostat 2; the likeliest stays in any case."""
    lowest = rows.log_total - parameters.mu * log(2.0)
    first = rows.first(rows.kept, torch.ones_like(lowest)) if bool((rows.highest < lowest).any()) else 0.0
    rows.keep((at_least(rows.scaled, lowest) + first).clamp_(max=1.0))


def _keep_with_min_keep(rows: FullRows, mask: Tensor, parameters: Parameters) -> None:
    if _too_few(rows, mask, parameters):
        mask = torch.maximum(mask, rows.first(rows.kept, parameters.min_keep.double()))
    rows.keep(mask)


def _too_few(rows: FullRows, mask: Tensor, parameters: Parameters) -> bool:
    return bool((row_sums(mask * rows.kept) < parameters.min_keep).any())
