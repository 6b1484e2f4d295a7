"""Draws of the usual chains for many rows at once, in operations of which the host needs to see nothing.

For accelerators, where to look at a number is to wait for all that comes before it. The tokens are those that rows get
where each stage is looked at; a row that the likeliest few tokens do not settle is told to be open, to be drawn there.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, fields, replace
from itertools import chain as joined
from operator import attrgetter

import torch
from torch import Tensor

from serve_app.core.request import SamplingParams
from serve_app.engine.decoder.host_copies import sent
from serve_app.engine.sampling.candidates import Candidates, Rest, choose_candidates
from serve_app.engine.sampling.chain import can_drop, order_of, stages_of
from serve_app.engine.sampling.draw import pick
from serve_app.engine.sampling.drawing import NUM_CANDIDATES
from serve_app.engine.sampling.moments import Moments, Need, of_candidates
from serve_app.engine.sampling.parameters import Parameters
from serve_app.engine.sampling.stages import Stage
from serve_app.engine.sampling.whole import draw, row_sums
from serve_app.engine.scheduler.sequence import Sequence

USUAL = frozenset({"temperature", "top_k", "top_p", "min_p"})
"""Stages that are computed here; behind one of them that drops tokens nothing but candidates is left."""
CARRIED = USUAL | {
    "seed", "min_keep", "samplers", "logit_bias", "allowed_token_ids", "bad_words", "dry", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "penalty_window", "repetition_sees_prompt",
    "xtc_threshold", "dynamic_temperature_exponent", "mirostat_tau", "mirostat_eta",
}  # fmt: skip
"""Parameters that these stages, the edits before them and the draw follow, or that say nothing beside a neutral one."""
_others = attrgetter(*(field.name for field in fields(SamplingParams) if field.name not in CARRIED))
_NEUTRAL = _others(SamplingParams())
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Choice:
    """Of each row, on the device.

    token_ids: [rows] int64;  probabilities: [rows] float64, of what was drawn
    is_settled: [rows] bool; the others are to be drawn where each stage is looked at
    """

    token_ids: Tensor
    probabilities: Tensor
    is_settled: Tensor


def is_usual(sequence: Sequence) -> bool:
    """Whether nothing but the usual stages says what is drawn, and of the draw nothing but the token is asked for.

    A parameter that is not known here is not followed here: any other value than its neutral one makes a row unusual.
    """
    params, wanted = sequence.request.sampling, sequence.request.logprobs
    if wanted is not None and wanted.post_sampling:
        return False
    return params.is_greedy or bool(_others(params) == _NEUTRAL)


def draw_blindly(logits: Tensor, sequences: Items[Sequence]) -> Choice:
    """Draw one token per row; sequences: usual ones, none of them greedy.

    logits: [rows, vocab] float32, edited, -inf is out of play; where a row has no finite one, its token means nothing
    """
    own = Parameters.of_sequences(sequences, HOST)
    parameters = own.sent(logits.device)
    whole: list[int] = []
    parts: list[tuple[list[int], Choice]] = []
    for order, rows in _rows_by_order(sequences).items():
        stages = stages_of(order)
        drops = can_drop(stages, own).tolist()
        whole += [row for row in rows if not drops[row]]
        if few := [row for row in rows if drops[row]]:
            places = torch.tensor(few)
            there = sent(places, logits.device)
            chosen = _draw_few(_rows(logits, few, there), stages, own.of(places), parameters.of(there))
            parts.append((few, chosen))
    if whole:
        there = sent(torch.tensor(whole), logits.device)
        divisor = sent(_divisors([sequences[row] for row in whole]), logits.device)
        parts.append((whole, _draw_whole(_rows(logits, whole, there), divisor, parameters.keys.index_select(0, there))))
    return _in_order(parts, logits.device)


def whole_totals(logits: Tensor, divisor: Tensor, token_ids: Tensor) -> Tensor:
    """As `whole.log_total`, of many rows; [rows, vocab] float32, [rows] float64, [rows, n] int64 -> [rows] float64"""
    highest = logits.amax(-1)
    weights = light_weights(logits, highest, divisor).scatter_(1, token_ids, 0.0)
    own = torch.exp((logits.gather(1, token_ids).double() - highest.double()[:, None]) / divisor[:, None])
    return highest.double() / divisor + torch.log(row_sums(weights) + own.sum(-1))


def light_weights(logits: Tensor, highest: Tensor, divisor: Tensor) -> Tensor:
    """As `whole.light_weights`, of many rows; [rows, vocab] float32, [rows], [rows] float64 -> [rows, vocab] float32"""
    return torch.sub(logits, highest[:, None]).div_(divisor.float()[:, None]).exp_()


def _draw_few(logits: Tensor, stages: Items[Stage], own: Parameters, parameters: Parameters) -> Choice:
    """Draw from the likeliest tokens; own: the same parameters in the host's memory."""
    found = choose_candidates(logits, NUM_CANDIDATES)
    has_dropped = torch.zeros(len(logits), dtype=torch.bool)
    for stage in stages:
        is_active = stage.is_active(own)
        if not is_active.any():
            continue
        sums = _sums(found, logits, stage.need, sees_rest=bool((is_active & ~has_dropped).any()))
        runs = stage.is_active(parameters) & (found.rest != Rest.UNKNOWN)
        found = found.merged(runs, stage.apply(found, parameters, sums))
        if stage.drops:
            has_dropped |= is_active
    weights = torch.exp(found.masked_logits - found.highest)
    columns = pick(weights, found.token_ids, parameters.keys)[:, None]
    probabilities = weights.gather(1, columns)[:, 0] / torch.cumsum(weights, dim=-1)[:, -1]
    return Choice(found.token_ids.gather(1, columns)[:, 0], probabilities, found.rest == Rest.GONE)


def _sums(found: Candidates, logits: Tensor, need: Need, *, sees_rest: bool) -> Moments:
    """sees_rest: whether of any row all tokens may still be in play"""
    sums = of_candidates(found, need)
    if need is Need.NOTHING or not sees_rest or found.logits.shape[-1] == logits.shape[-1]:
        return sums
    totals = whole_totals(logits, found.divisor, found.token_ids)
    return replace(sums, log_total=torch.where(found.rest == Rest.WHOLE, totals, sums.log_total))


def _draw_whole(logits: Tensor, divisor: Tensor, keys: Tensor) -> Choice:
    """Draw from all tokens."""
    token_ids, probabilities = draw(light_weights(logits, logits.amax(-1), divisor), keys)
    return Choice(token_ids, probabilities, torch.ones_like(token_ids, dtype=torch.bool))


def _divisors(sequences: Items[Sequence]) -> Tensor:
    params = [sequence.request.sampling for sequence in sequences]
    found = [each.temperature if "temperature" in order_of(each) else 1.0 for each in params]
    return torch.tensor(found, dtype=torch.float64)


def _rows_by_order(sequences: Items[Sequence]) -> dict[tuple[str, ...], list[int]]:
    rows: dict[tuple[str, ...], list[int]] = {}
    for row, sequence in enumerate(sequences):
        order = tuple(name for name in order_of(sequence.request.sampling) if name in USUAL)
        rows.setdefault(order, []).append(row)
    return rows


def _rows(logits: Tensor, rows: list[int], there: Tensor) -> Tensor:
    """Without a copy where they are all of them in their order."""
    return logits if rows == list(range(len(logits))) else logits.index_select(0, there)


def _in_order(parts: list[tuple[list[int], Choice]], device: torch.device) -> Choice:
    """The choices of all parts by their rows."""
    rows = list(joined.from_iterable(places for places, _ in parts))
    if len(parts) == 1 and rows == sorted(rows):
        return parts[0][1]
    places = sent(torch.argsort(torch.tensor(rows)), device)
    return Choice(
        torch.cat([each.token_ids for _, each in parts]).index_select(0, places),
        torch.cat([each.probabilities for _, each in parts]).index_select(0, places),
        torch.cat([each.is_settled for _, each in parts]).index_select(0, places),
    )
