"""Draws one token per row: the chain on a few candidates, exactly, and with more of them where few do not tell.

A row is settled when it is certain what happens to all tokens that are no candidates: all dropped, or none. The
others are tried again with more candidates, in the end with the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from serve_app.engine.sampling.candidates import Candidates, Rest, choose_candidates
from serve_app.engine.sampling.chain import can_drop, order_of, run_chain, stages_of
from serve_app.engine.sampling.draw import pick
from serve_app.engine.sampling.parameters import Parameters
from serve_app.engine.sampling.stages import Stage
from serve_app.engine.sampling.whole import Whole
from serve_app.engine.sequence import Sequence

NUM_CANDIDATES = (256, 4096)  # first try, second try; then the whole vocabulary


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn token.

    probability: in the distribution it was drawn from
    top:         the likeliest tokens of that distribution with their natural log-probabilities, where wanted
    """

    token_id: int
    probability: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class _Task:
    """What is to be drawn: rows of logits [rows, vocab] with their parameters and how many likeliest are reported."""

    logits: Tensor
    parameters: Parameters
    num_top: list[int]

    def of(self, rows: list[int]) -> _Task:
        if len(rows) == self.logits.shape[0]:
            return self
        places = torch.tensor(rows, device=self.logits.device)
        return _Task(self.logits[places], self.parameters.of(places), [self.num_top[row] for row in rows])


def draw_tokens(logits: Tensor, sequences: Items[Sequence]) -> list[Drawn]:
    """Draw one token per row from what its chain leaves. Changes nothing.

    logits: [rows, vocab] float32, edited; each row has a finite one, -inf is out of play
    """
    parameters = Parameters.of_sequences(sequences, logits.device)
    task = _Task(logits, parameters, [_num_top(sequence) for sequence in sequences])
    drawn: dict[int, Drawn] = {}
    for order, rows in _rows_by_order(sequences).items():
        chain = stages_of(order)
        drops = can_drop(chain, parameters).tolist()
        drawn |= _draw_rows(task, [row for row in rows if not drops[row]], chain, num_candidates=0)
        for num_candidates in NUM_CANDIDATES:
            if num_candidates < logits.shape[-1]:
                drawn |= _draw_rows(
                    task, [row for row in rows if row not in drawn], chain, num_candidates=num_candidates
                )
        for row in [row for row in rows if row not in drawn]:  # one by one: everything about them is large
            drawn |= _draw_rows(task, [row], chain, num_candidates=logits.shape[-1])
    return [drawn[row] for row in range(len(sequences))]


def _draw_rows(task: _Task, rows: list[int], chain: Items[Stage], *, num_candidates: int) -> dict[int, Drawn]:
    """Draw for those of the rows that so many candidates settle."""
    if not rows:
        return {}
    own = task.of(rows)
    found = run_chain(choose_candidates(own.logits, num_candidates), chain, own.parameters, own.logits)
    drawn = {}
    inside = torch.nonzero(found.rest == Rest.GONE)[:, 0]
    if len(inside):
        drawn = _draw_candidates(found, inside, own)
    is_open = (found.rest == Rest.WHOLE) | (found.rest == Rest.PIERCED)
    for place in torch.nonzero(is_open)[:, 0].tolist():
        drawn[place] = _draw_whole(found, place, own)
    return {rows[place]: result for place, result in drawn.items()}


def _draw_candidates(found: Candidates, places: Tensor, task: _Task) -> dict[int, Drawn]:
    """Draw for rows of which nothing but candidates is left; places: [n]"""
    weights = torch.exp(found.masked_logits[places] - found.highest[places])
    totals = torch.cumsum(weights, dim=-1)[:, -1]
    token_ids = found.token_ids[places]
    columns = pick(weights, token_ids, task.parameters.keys[places])[:, None]
    tokens = token_ids.gather(1, columns)[:, 0].tolist()
    probabilities = (weights.gather(1, columns)[:, 0] / totals).tolist()
    drawn = {}
    for index, place in enumerate(places.tolist()):
        top = _top(weights[index] / totals[index], token_ids[index], task.num_top[place])
        drawn[place] = Drawn(tokens[index], probabilities[index], top)
    return drawn


def _draw_whole(found: Candidates, place: int, task: _Task) -> Drawn:
    """Draw for a row of which more than candidates is left."""
    is_dropped = (found.logits[place] > found.edge[place]) & ~found.kept[place]
    everything = Whole.of(task.logits[place], found.divisor[place], found.token_ids[place][is_dropped])
    token_id = everything.draw(task.parameters.keys[place])
    total = everything.weights.sum()
    top: tuple[tuple[int, float], ...] = ()
    if num_top := task.num_top[place]:
        ids = torch.arange(task.logits.shape[-1], device=task.logits.device)
        top = _top(everything.weights / total, ids, num_top)
    return Drawn(token_id, float(everything.weights[token_id] / total), top)


def _top(probabilities: Tensor, token_ids: Tensor, num_top: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens that may be drawn; [n] float64, [n] int64"""
    if not num_top:
        return ()
    values, places = torch.topk(probabilities, min(num_top, len(probabilities)))
    pairs = zip(token_ids[places].tolist(), values.tolist(), strict=True)
    return tuple((token_id, log(value)) for token_id, value in pairs if value > 0.0)


def _num_top(sequence: Sequence) -> int:
    wanted = sequence.request.logprobs
    return wanted.top if wanted is not None and wanted.post_sampling else 0


def _rows_by_order(sequences: Items[Sequence]) -> dict[tuple[str, ...], list[int]]:
    rows: dict[tuple[str, ...], list[int]] = {}
    for row, sequence in enumerate(sequences):
        rows.setdefault(order_of(sequence.request.sampling), []).append(row)
    return rows
