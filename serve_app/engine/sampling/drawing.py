"""Draws one token per row: the chain on a few candidates, exactly, and with more of them where few do not tell.

A row is settled when it is certain what happens to all tokens that are no candidates: all dropped, or none. For the
others the chain runs again with every token in view: those of one value together where values are few, or one by one,
unsorted; in a small vocabulary, sorted.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from math import log
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from serve_app.engine.sampling.candidates import Candidates, Rest, choose_candidates
from serve_app.engine.sampling.chain import active_stages, can_drop, order_of, run_chain, run_full_chain, stages_of
from serve_app.engine.sampling.draw import pick
from serve_app.engine.sampling.full import FullRow
from serve_app.engine.sampling.levels import LevelRow
from serve_app.engine.sampling.parameters import Parameters
from serve_app.engine.sampling.racing import Left, kernels_for, race
from serve_app.engine.sampling.scratch import Scratch
from serve_app.engine.sampling.selection import MAX_SORTED
from serve_app.engine.sampling.stages import Stage
from serve_app.engine.sampling.whole import draw, light_weights_without, row_sums, weights_without
from serve_app.engine.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from serve_app.kernels.cpu.vocabulary import VocabularyKernels

NUM_CANDIDATES = 256
MORE_CANDIDATES = 1024  # a third of the time of the whole vocabulary, and enough for most that 256 do not settle
ROWS_AT_ONCE = 32  # of which the logits may be copied


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
    """What is to be drawn.

    logits:     [any rows, vocab], of which `rows` are meant, [n]
    parameters: theirs
    num_top:    how many likeliest tokens are reported of each
    highest:    logits of each; none where nobody has looked
    """

    logits: Tensor
    rows: list[int]
    parameters: Parameters
    num_top: list[int]
    scratch: Scratch
    highest: list[float]

    def of(self, places: list[int]) -> _Task:
        """The part of it at these places of `rows`."""
        if len(places) == len(self.rows):
            return self
        rows, num_top = [self.rows[place] for place in places], [self.num_top[place] for place in places]
        parameters = self.parameters.of(torch.tensor(places, device=self.logits.device))
        highest = [self.highest[place] for place in places] if self.highest else []
        return replace(self, rows=rows, parameters=parameters, num_top=num_top, highest=highest)

    def at(self, place: int) -> _Task:
        """The part of it at one place."""
        parameters = self.parameters.at(place)
        highest = self.highest[place : place + 1]
        rows, num_top = [self.rows[place]], [self.num_top[place]]
        return replace(self, rows=rows, parameters=parameters, num_top=num_top, highest=highest)

    def found_highest(self) -> list[float]:
        """Logits of the rows."""
        return self.highest or torch.stack([self.logits[row].amax() for row in self.rows]).tolist()

    def own_logits(self) -> Tensor:
        """[n, vocab], a copy only where the rows do not lie side by side."""
        first, num_rows = self.rows[0], len(self.rows)
        if self.rows == list(range(first, first + num_rows)):
            return self.logits[first : first + num_rows]
        size = num_rows * self.logits.shape[-1]
        copied = self.scratch.of_size("rows", size, self.logits.dtype, self.logits.device).view(num_rows, -1)
        return torch.index_select(self.logits, 0, torch.tensor(self.rows, device=copied.device), out=copied)


def draw_tokens(
    logits: Tensor,
    sequences: Items[Sequence],
    rows: Items[int] | None = None,
    *,
    scratch: Scratch | None = None,
    highest: Items[float] = (),
) -> list[Drawn]:
    """Draw one token per row from what its chain leaves. Changes nothing but scratch.

    logits: [any rows, vocab] float32, edited; each row drawn from has a finite one, -inf is out of play
    rows:   the sequences' rows; all in their order where left out
    highest: logit of each of them, where that is known
    """
    parameters = Parameters.of_sequences(sequences, logits.device)
    where = list(range(len(sequences)) if rows is None else rows)
    num_top = [_num_top(sequence) for sequence in sequences]
    task = _Task(logits, where, parameters, num_top, scratch or Scratch(), list(highest))
    kernels = kernels_for(logits)
    drawn: dict[int, Drawn] = {}
    for order, places in _places_by_order(sequences).items():
        chain = stages_of(order)
        drops = can_drop(chain, parameters).tolist()
        whole = [place for place in places if not drops[place]]
        if kernels is not None:
            drawn |= _draw_all(kernels, task, whole, order)
            drawn |= _draw_levels(kernels, task, [place for place in whole if place not in drawn], chain)
        drawn |= _draw_few(task, [place for place in whole if place not in drawn], chain, num_candidates=0)
        for num_candidates in _numbers_of_candidates(logits.shape[-1]):
            unsettled = [place for place in places if place not in drawn]
            drawn |= _draw_few(task, unsettled, chain, num_candidates=num_candidates)
            if kernels is not None and num_candidates == NUM_CANDIDATES:
                unsettled = [place for place in unsettled if place not in drawn]
                drawn |= _draw_levels(kernels, task, unsettled, chain)
        drawn |= _draw_full(task, [place for place in places if place not in drawn], chain)
    return [drawn[place] for place in range(len(sequences))]


def _numbers_of_candidates(vocab: int) -> tuple[int, ...]:
    """How many to try one after the other; what none settles is drawn with every token in view."""
    if vocab <= NUM_CANDIDATES:
        return (NUM_CANDIDATES,)
    return (NUM_CANDIDATES, vocab) if vocab <= MAX_SORTED else (NUM_CANDIDATES, MORE_CANDIDATES)


def _draw_few(task: _Task, places: list[int], chain: Items[Stage], *, num_candidates: int) -> dict[int, Drawn]:
    """Draw for those of the places that so many candidates settle, some rows at a time."""
    drawn: dict[int, Drawn] = {}
    for first in range(0, len(places), ROWS_AT_ONCE):
        few = places[first : first + ROWS_AT_ONCE]
        own = task.of(few)
        logits = own.own_logits()
        found = run_chain(choose_candidates(logits, num_candidates), chain, own.parameters, logits, task.scratch)
        inside = torch.nonzero(found.rest == Rest.GONE)[:, 0]
        settled = _draw_candidates(found, inside, own) if len(inside) else {}
        is_open = (found.rest == Rest.WHOLE) | (found.rest == Rest.PIERCED)
        for place in torch.nonzero(is_open)[:, 0].tolist():
            settled[place] = _draw_whole(found, place, own)
        drawn |= {few[place]: result for place, result in settled.items()}
    return drawn


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
    own, divisor = task.logits[task.rows[place]][None], found.divisor[place, None]
    dropped = found.token_ids[place][is_dropped]
    drawn = _drawn_by_weight(light_weights_without(own, divisor, dropped, task.scratch), place, task)
    if not task.num_top[place]:
        return drawn
    weights = weights_without(own, divisor, dropped, task.scratch)
    probabilities = weights[0] / row_sums(weights)
    top = _top_of_all(probabilities, task.num_top[place])
    return replace(drawn, probability=float(probabilities[drawn.token_id]), top=top)


def _draw_all(kernels: VocabularyKernels, task: _Task, places: list[int], order: Items[str]) -> dict[int, Drawn]:
    """Draw for those of the places of which every token is left, and nothing but a token is wanted."""
    ranges = task.parameters.dynamic_temperature_range.tolist()
    plain = [place for place in places if ranges[place] == 0.0 and not task.num_top[place]]
    if not plain:
        return {}
    own = task.of(plain)
    divisors = own.parameters.temperature.tolist() if "temperature" in order else [1.0] * len(plain)
    left = [Left(highest, divisor) for highest, divisor in zip(own.found_highest(), divisors, strict=True)]
    found = race(kernels, own.logits, own.rows, left, own.parameters.keys)
    return {place: Drawn(*result) for place, result in zip(plain, found, strict=True)}


def _draw_levels(kernels: VocabularyKernels, task: _Task, places: list[int], chain: Items[Stage]) -> dict[int, Drawn]:
    """Draw for those of the places whose rows have few values; in a small vocabulary, which is sorted, for none."""
    if not places or task.logits.shape[-1] <= MAX_SORTED:
        return {}
    drawn: dict[int, Drawn] = {}
    racing: dict[int, Left] = {}
    counted = kernels.count(task.logits, [task.rows[place] for place in places])
    active = active_stages(chain, task.parameters)
    for place, values in zip(places, counted, strict=True):
        if values is None:
            continue
        own = task.at(place)
        row = own.logits[own.rows[0]]
        levels = LevelRow(kernels, row, values)
        run_full_chain(levels, active[place], own.parameters)
        left = levels.left()
        num_left = int(levels.num_kept)
        if not task.num_top[place] and num_left > MAX_SORTED:
            racing[place] = left
            continue
        token_ids = kernels.ids(row, left.in_play, num_left)
        drawn[place] = _raced(token_ids, left.weights(row[token_ids]), own)
    if racing:
        own = task.of(list(racing))
        found = race(kernels, own.logits, own.rows, list(racing.values()), own.parameters.keys)
        drawn |= {place: Drawn(*result) for place, result in zip(racing, found, strict=True)}
    return drawn


def _draw_full(task: _Task, places: list[int], chain: Items[Stage]) -> dict[int, Drawn]:
    """Draw for rows that candidates do not settle, one after the other."""
    if not places:
        return {}
    drawn = {}
    active = active_stages(chain, task.parameters)
    for place in places:
        own = task.at(place)
        full = FullRow(own.own_logits(), task.scratch)
        run_full_chain(full, active[place], own.parameters)
        drawn[place] = _draw_kept(full, own)
    return drawn


def _draw_kept(full: FullRow, task: _Task) -> Drawn:
    """Draw for a row that is at the end of the chain: in one race where few tokens are left, else in two."""
    full.narrow()
    if full.token_ids is None:
        weights = full.weights
        drawn = _drawn_by_weight(weights, 0, task)
        num_top = task.num_top[0]
        return replace(drawn, top=_top_of_all((weights / row_sums(weights))[0], num_top)) if num_top else drawn
    chosen = torch.nonzero(full.kept[0])[:, 0]
    token_ids, scaled = full.token_ids[chosen], full.scaled[0, chosen]
    return _raced(token_ids, torch.exp(scaled - scaled.amax()), task)


def _raced(token_ids: Tensor, weights: Tensor, task: _Task) -> Drawn:
    """Draw for one row in one race; [n] int64, [n] float64"""
    column = int(pick(weights[None], token_ids, task.parameters.keys))
    probabilities = weights / torch.cumsum(weights, dim=-1)[-1]
    return Drawn(int(token_ids[column]), float(probabilities[column]), _top(probabilities, token_ids, task.num_top[0]))


def _drawn_by_weight(weights: Tensor, place: int, task: _Task) -> Drawn:
    """Draw for one row from weights [1, vocab]."""
    token_id, probability = draw(weights, task.parameters.keys[place, None])
    return Drawn(int(token_id), float(probability))


def _top_of_all(probabilities: Tensor, num_top: int) -> tuple[tuple[int, float], ...]:
    """Of the whole vocabulary; [vocab] float64"""
    return _top(probabilities, torch.arange(len(probabilities), device=probabilities.device), num_top)


def _top(probabilities: Tensor, token_ids: Tensor, num_top: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens that may be drawn; [n] float64, [n] int64"""
    if not num_top:
        return ()
    values, places = torch.topk(probabilities, min(num_top, len(probabilities)))
    pairs = zip(token_ids[places].tolist(), values.tolist(), strict=True)
    return tuple((token_id, log(value)) for token_id, value in pairs if value > 0.0)


def _num_top(sequence: Sequence) -> int:
    wanted = sequence.request.logprobs
    return wanted.top or 0 if wanted is not None and wanted.post_sampling else 0


def _places_by_order(sequences: Items[Sequence]) -> dict[tuple[str, ...], list[int]]:
    places: dict[tuple[str, ...], list[int]] = {}
    for place, sequence in enumerate(sequences):
        places.setdefault(order_of(sequence.request.sampling), []).append(place)
    return places
