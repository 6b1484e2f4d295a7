"""Draws one token per row: the chain on a few candidates, exactly, and with more of them where few do not tell.

A row is settled when it is certain what happens to all tokens that are no candidates: all dropped, or none. For the
others the chain runs again: on more candidates where the row is steep, else with every token in view, unsorted.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from serve_app.engine.sampling.candidates import Candidates, Rest, choose_candidates, largest
from serve_app.engine.sampling.chain import activity, can_drop, order_of, run_chain, run_full_chain, stages_of
from serve_app.engine.sampling.draw import pick
from serve_app.engine.sampling.full import FullRows
from serve_app.engine.sampling.parameters import Parameters
from serve_app.engine.sampling.selection import MAX_SORTED
from serve_app.engine.sampling.stages import Stage
from serve_app.engine.sampling.whole import draw, row_sums, slabs, weights_without
from serve_app.engine.sequence import Sequence

NUM_CANDIDATES = 256
STEEP = 4.0  # nats from the likeliest candidate to the last; a matter of speed alone


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
    vocab = logits.shape[-1]
    drawn: dict[int, Drawn] = {}
    for order, rows in _rows_by_order(sequences).items():
        chain = stages_of(order)
        drops = can_drop(chain, parameters).tolist()
        drawn |= _draw_rows(task, [row for row in rows if not drops[row]], chain, num_candidates=0)
        if vocab > NUM_CANDIDATES:
            unsettled = [row for row in rows if row not in drawn]
            drawn |= _draw_rows(task, unsettled, chain, num_candidates=NUM_CANDIDATES)
        unsettled = [row for row in rows if row not in drawn]
        more = unsettled if vocab <= MAX_SORTED else _steep(logits, unsettled)
        drawn |= _draw_rows(task, more, chain, num_candidates=min(MAX_SORTED, vocab))
        drawn |= _draw_full(task, [row for row in rows if row not in drawn], chain)
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
    open_rows = torch.nonzero(is_open)[:, 0]
    for rows_at_once in slabs(len(open_rows)):
        drawn |= _draw_whole(found, open_rows[rows_at_once], own)
    return {rows[place]: result for place, result in drawn.items()}


def _steep(logits: Tensor, rows: list[int]) -> list[int]:
    """Those of the rows whose likeliest tokens stand out, so that a few thousand are likely to settle them."""
    if not rows:
        return []
    values = largest(logits[torch.tensor(rows, device=logits.device)], NUM_CANDIDATES)
    is_steep = (values[:, 0] - values[:, -1] > STEEP).tolist()
    return [row for row, steep in zip(rows, is_steep, strict=True) if steep]


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


def _draw_whole(found: Candidates, places: Tensor, task: _Task) -> dict[int, Drawn]:
    """Draw for a few rows of which more than candidates is left; places: [n]"""
    is_dropped = (found.logits[places] > found.edge[places, None]) & ~found.kept[places]
    dropped = [ids[gone] for ids, gone in zip(found.token_ids[places], is_dropped, strict=True)]
    weights = weights_without(task.logits[places], found.divisor[places], dropped)
    return _drawn_by_weight(weights, places, task)


def _draw_full(task: _Task, rows: list[int], chain: Items[Stage]) -> dict[int, Drawn]:
    """Draw for rows that candidates do not settle, a few of the same active stages at a time."""
    alike: dict[tuple[bool, ...], list[int]] = {}
    active = activity(chain, task.parameters)
    for row in rows:
        alike.setdefault(active[row], []).append(row)
    drawn: dict[int, Drawn] = {}
    for group in alike.values():
        for rows_at_once in slabs(len(group)):
            few = group[rows_at_once]
            own = task.of(few)
            full = FullRows(own.logits)
            run_full_chain(full, chain, own.parameters)
            drawn |= {few[place]: result for place, result in _draw_kept(full, own).items()}
    return drawn


def _draw_kept(full: FullRows, task: _Task) -> dict[int, Drawn]:
    """Draw for rows that are at the end of the chain: in one race where few tokens are left, else in two."""
    is_few = full.num_kept <= MAX_SORTED
    many = torch.nonzero(~is_few)[:, 0]
    drawn = _drawn_by_weight(full.weights[many], many, task) if len(many) else {}
    for place in torch.nonzero(is_few)[:, 0].tolist():
        token_ids = torch.nonzero(full.kept[place])[:, 0]
        scaled = full.scaled[place, token_ids]
        weights = torch.exp(scaled - scaled.amax())
        column = int(pick(weights[None], token_ids, task.parameters.keys[place, None]))
        probabilities = weights / torch.cumsum(weights, dim=-1)[-1]
        top = _top(probabilities, token_ids, task.num_top[place])
        drawn[place] = Drawn(int(token_ids[column]), float(probabilities[column]), top)
    return drawn


def _drawn_by_weight(weights: Tensor, places: Tensor, task: _Task) -> dict[int, Drawn]:
    """Draw from weights [n, vocab] of the rows at `places` [n]."""
    token_ids, probabilities = draw(weights, task.parameters.keys[places])
    drawn = {}
    for index, place in enumerate(places.tolist()):
        top: tuple[tuple[int, float], ...] = ()
        if num_top := task.num_top[place]:
            every_id = torch.arange(weights.shape[-1], device=weights.device)
            top = _top(weights[index] / row_sums(weights[index, None]), every_id, num_top)
        drawn[place] = Drawn(int(token_ids[index]), float(probabilities[index]), top)
    return drawn


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
