"""The stages of the chain on a full row: what `stages` and `mirostat` say of candidates, said of every token.

Each changes the row it is given, for which it must be active.
"""

from __future__ import annotations

from math import inf, log

import torch

from serve_app.engine.sampling.levels import AnyRow
from serve_app.engine.sampling.mirostat import NUM_ESTIMATED, zipf_count, zipf_exponent
from serve_app.engine.sampling.parameters import Parameters
from serve_app.engine.sampling.stages import ROUNDING, dynamic_temperature
from serve_app.engine.sampling.whole import row_sums


def divide_by_temperature(row: AnyRow, parameters: Parameters) -> None:
    row.divide(parameters.temperature)


def divide_by_dynamic_temperature(row: AnyRow, parameters: Parameters) -> None:
    row.divide(dynamic_temperature(parameters, row.entropy, row.num_kept))


def keep_top_n_sigma(row: AnyRow, parameters: Parameters) -> None:
    row.keep_from(row.highest - parameters.top_n_sigma * row.deviation)


def keep_top_k(row: AnyRow, parameters: Parameters) -> None:
    row.keep(row.first(row.kept, parameters.top_k.double()))


def keep_typical(row: AnyRow, parameters: Parameters) -> None:
    """Those of the most typical surprise first; of equals the likelier."""
    distances = row.scratch.take("distances", row.scaled, torch.float64)
    torch.sub(row.log_total[:, None], row.scaled, out=distances).sub_(row.entropy[:, None]).abs_()
    bound = (parameters.typical_p - ROUNDING) * row_sums(row.weights)
    mask = row.nearest(distances, bound)
    row.keep_any(row.unless_enough(mask, parameters.min_keep, distances))


def keep_top_p(row: AnyRow, parameters: Parameters) -> None:
    weights = row.weights
    mask = row.first(weights, (parameters.top_p - ROUNDING) * row_sums(weights))
    row.keep(row.unless_enough(mask, parameters.min_keep, None))


def keep_min_p(row: AnyRow, parameters: Parameters) -> None:
    mask = row.at_least(row.highest + torch.log(parameters.min_p))
    row.keep(row.unless_enough(mask, parameters.min_keep, None))


def exclude_top_choices(row: AnyRow, parameters: Parameters) -> None:
    """The least likely of the top choices is the last of its equals."""
    above = row.at_least(torch.log(parameters.xtc_threshold) + row.log_total - ROUNDING)
    above = torch.minimum(above, row.kept, out=above)
    num_dropped = float(row_sums(above)) - 1.0
    if num_dropped > 0.0 and float(row.num_kept) - num_dropped >= float(parameters.min_keep):
        row.drop_all_but_last(above)


def keep_by_zipf(row: AnyRow, parameters: Parameters) -> None:
    """Mirostat 1."""
    likeliest = row.likeliest(NUM_ESTIMATED)
    vocab = row.num_kept
    counts = torch.minimum(zipf_count(zipf_exponent(likeliest, likeliest > -inf), parameters.mu, vocab), vocab)
    row.keep(row.first(row.kept, counts))


def keep_by_surprise(row: AnyRow, parameters: Parameters) -> None:
    """Mirostat 2; the likeliest stays in any case."""
    lowest = row.log_total - parameters.mu * log(2.0)
    if bool(row.highest < lowest):
        row.keep(row.first(row.kept, torch.ones_like(lowest)))
    else:
        row.keep_from(lowest)
