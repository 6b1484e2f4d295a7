"""The stages of the chain on a full row: what `stages` and `mirostat` say of candidates, said of every token.

Each changes the row it is given, for which it must be active.
"""

from __future__ import annotations

from math import inf, log

import torch

from serve_app.engine.sampling.candidates import largest
from serve_app.engine.sampling.full import FullRow
from serve_app.engine.sampling.mirostat import NUM_ESTIMATED, zipf_count, zipf_exponent
from serve_app.engine.sampling.parameters import Parameters
from serve_app.engine.sampling.selection import keep_until
from serve_app.engine.sampling.stages import ROUNDING, dynamic_temperature
from serve_app.engine.sampling.whole import row_sums


def divide_by_temperature(row: FullRow, parameters: Parameters) -> None:
    row.divide(parameters.temperature)


def divide_by_dynamic_temperature(row: FullRow, parameters: Parameters) -> None:
    row.divide(dynamic_temperature(parameters, row.entropy, row.num_kept))


def keep_top_n_sigma(row: FullRow, parameters: Parameters) -> None:
    row.keep_from(row.highest - parameters.top_n_sigma * row.deviation)


def keep_top_k(row: FullRow, parameters: Parameters) -> None:
    row.keep(row.first(row.kept, parameters.top_k.double()))


def keep_typical(row: FullRow, parameters: Parameters) -> None:
    """Those of the most typical surprise first; of equals the likelier."""
    nearness = row.scratch.take("nearness", row.scaled, torch.float64)
    torch.sub(row.log_total[:, None], row.scaled, out=nearness).sub_(row.entropy[:, None]).abs_().neg_()
    bound = (parameters.typical_p - ROUNDING) * row_sums(row.weights)
    mask = keep_until(nearness, row.weights, float(bound), ties=row.logits, scratch=row.scratch)
    row.keep_any(row.unless_enough(mask, parameters.min_keep, nearness, row.logits))


def keep_top_p(row: FullRow, parameters: Parameters) -> None:
    bound = (parameters.top_p - ROUNDING) * row_sums(row.weights)
    mask = row.first(row.weights, bound)
    row.keep(row.unless_enough(mask, parameters.min_keep, row.logits, None))


def keep_min_p(row: FullRow, parameters: Parameters) -> None:
    mask = row.at_least(row.highest + torch.log(parameters.min_p))
    row.keep(row.unless_enough(mask, parameters.min_keep, row.logits, None))


def exclude_top_choices(row: FullRow, parameters: Parameters) -> None:
    """The least likely of the top choices is the last of its equals."""
    above = row.at_least(torch.log(parameters.xtc_threshold) + row.log_total - ROUNDING).mul_(row.kept)
    num_dropped = float(row_sums(above)) - 1.0
    if num_dropped <= 0.0 or float(row.num_kept) - num_dropped < float(parameters.min_keep):
        return
    is_not = torch.sub(1.0, above, out=row.scratch.take("own", above, torch.float64))
    heights = is_not.div_(above).add_(row.scaled).nan_to_num_(nan=inf, posinf=inf)  # infinite where not above
    last = torch.nonzero(heights[0] == heights.amin())[-1]
    mask = above.neg_().add_(1.0)
    mask[0, last] = 1.0
    row.keep_any(mask)


def keep_by_zipf(row: FullRow, parameters: Parameters) -> None:
    """Mirostat 1."""
    values = largest(row.logits, min(NUM_ESTIMATED, row.logits.shape[-1]))
    likeliest = values.double() / row.divisor[:, None]
    vocab = row.num_kept
    counts = torch.minimum(zipf_count(zipf_exponent(likeliest, likeliest > -inf), parameters.mu, vocab), vocab)
    row.keep(row.first(row.kept, counts))


def keep_by_surprise(row: FullRow, parameters: Parameters) -> None:
    """Mirostat 2; the likeliest stays in any case."""
    lowest = row.log_total - parameters.mu * log(2.0)
    if bool(row.highest < lowest):
        row.keep(row.first(row.kept, torch.ones_like(lowest)))
    else:
        row.keep_from(lowest)
