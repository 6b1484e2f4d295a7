"""A step's draws as they are begun on a device, and looked at once, when all of them are made."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_app.engine.decoder.host_copies import Land, Landing, sent
from serve_app.engine.sampling.blind import Choice, draw_blindly
from serve_app.engine.sampling.candidates import block_maxima, likeliest, sorted_largest
from serve_app.engine.sampling.drawing import Drawn
from serve_app.engine.sampling.logprobs import Scored
from serve_app.engine.sampling.masking import EXHAUSTED, Exhausted, allowed_on
from serve_app.engine.sampling.masks import StepMasks
from serve_app.engine.sampling.whole import row_sums
from serve_app.engine.scheduler.sequence import Sequence

FACTS = 5
"""Numbers of each row that are looked at: its token, three flags, the probability."""


@dataclass(frozen=True, slots=True)
class Looks:
    """What was drawn, by the sequence's identity, and how likely it was where that was asked for.

    open: places of those that have to be drawn where each stage is looked at
    """

    drawn: dict[int, Drawn | Exhausted | None]
    scored: dict[int, Scored]
    open: list[int]


@dataclass(frozen=True, slots=True)
class Launched:
    """Draws for some sequences, usual ones, on their way to the host.

    token_ids: [rows] int64, on the device; of a row that is open, or has no numbers, anything
    scoring:   by number of likeliest tokens, the rows whose log-probabilities come along
    """

    sequences: Items[Sequence]
    token_ids: Tensor
    scoring: dict[int, list[int]]
    landing: Landing

    def take(self, places: list[int]) -> Tensor:
        """The tokens at these places, on the device."""
        if places == list(range(len(self.sequences))):
            return self.token_ids
        return self.token_ids.index_select(0, sent(torch.tensor(places), self.token_ids.device))

    def tokens_on_device(self) -> list[int]:
        """Wait for them, and tell which tokens the device has, those of open rows too."""
        return [int(number) for number in self.landing.wait()[: len(self.sequences)].tolist()]

    def look(self) -> Looks:
        """Wait for them."""
        numbers: list[float] = self.landing.wait().tolist()
        count = len(self.sequences)
        facts = [numbers[at * count : (at + 1) * count] for at in range(FACTS)]
        drawn: dict[int, Drawn | Exhausted | None] = {}
        left = []
        rows = zip(self.sequences, *facts, strict=True)
        for place, (sequence, token_id, is_finite, has_numbers, is_settled, probability) in enumerate(rows):
            if not is_finite:
                drawn[id(sequence)] = EXHAUSTED if has_numbers else None
            elif is_settled:
                drawn[id(sequence)] = Drawn(int(token_id), probability)
            else:
                left.append(place)
        return Looks(drawn, self._scored(numbers[FACTS * count :], drawn), left)

    def _scored(self, numbers: list[float], drawn: dict[int, Drawn | Exhausted | None]) -> dict[int, Scored]:
        """numbers: of each group its tokens' log-probabilities, then the likeliest ids, then theirs"""
        scored: dict[int, Scored] = {}
        for num_top, places in self.scoring.items():
            count, size = len(places), len(places) * num_top
            own, ids, tops = numbers[:count], numbers[count : count + size], numbers[count + size : count + 2 * size]
            for at, place in enumerate(places):
                token, part = drawn.get(id(self.sequences[place])), slice(at * num_top, (at + 1) * num_top)
                if isinstance(token, Drawn):
                    top = tuple(zip(map(int, ids[part]), tops[part], strict=True))
                    scored[id(self.sequences[place])] = Scored(token.token_id, own[at], top)
            numbers = numbers[count + 2 * size :]
        return scored


def launch(logits: Tensor, edited: Tensor, sequences: Items[Sequence], masks: StepMasks | None, land: Land) -> Launched:
    """Begin the draws of usual sequences; waits for masks alone, which the host makes.

    logits: [rows, vocab] float32, as they were given;  edited: the same with all edits but masks
    """
    edited = _restricted(edited, sequences, masks)
    best = likeliest(edited)
    is_finite = torch.isfinite(edited.gather(1, best[:, None])[:, 0])
    choice = _chosen(edited, best, sequences)
    flags = (is_finite, torch.isfinite(logits.amax(-1)), choice.is_settled)
    numbers = [choice.token_ids.double(), *(each.double() for each in flags), choice.probabilities]
    scoring = _scoring(sequences, logits.shape[-1])
    for num_top, places in scoring.items():
        there = sent(torch.tensor(places), logits.device)
        numbers += score_blindly(logits.index_select(0, there), choice.token_ids.index_select(0, there), num_top)
    return Launched(sequences, choice.token_ids, scoring, land(torch.cat(numbers)))


def score_blindly(logits: Tensor, targets: Tensor, num_top: int) -> list[Tensor]:
    """As `score`, in float64: log-probabilities of the targets [rows], ids of the likeliest, theirs, both flat.

    logits: [rows, vocab] float32;  targets: [rows] int64
    """
    highest = block_maxima(logits).amax(-1)
    weights = torch.sub(logits, highest[:, None]).exp_()
    totals = highest.double() + torch.log(row_sums(weights))
    own = logits.gather(1, targets[:, None])[:, 0] - totals
    if not num_top:
        return [own]
    values, token_ids = sorted_largest(logits, num_top)
    return [own, token_ids.double().flatten(), (values - totals[:, None]).flatten()]


def _chosen(edited: Tensor, best: Tensor, sequences: Items[Sequence]) -> Choice:
    """The likeliest tokens of greedy sequences, drawn ones of the others."""
    certain = Choice(best, torch.ones(len(best), dtype=torch.float64, device=best.device), torch.ones_like(best).bool())
    random = [row for row, sequence in enumerate(sequences) if not sequence.request.sampling.is_greedy]
    if not random:
        return certain
    there = sent(torch.tensor(random), best.device)
    rows = edited if len(random) == len(best) else edited.index_select(0, there)
    drawn = draw_blindly(rows, [sequences[row] for row in random])
    return Choice(
        certain.token_ids.index_copy(0, there, drawn.token_ids),
        certain.probabilities.index_copy(0, there, drawn.probabilities),
        certain.is_settled.index_copy(0, there, drawn.is_settled),
    )


def _restricted(edited: Tensor, sequences: Items[Sequence], masks: StepMasks | None) -> Tensor:
    """A copy in which what constraints do not allow is -inf; the same where none of these rows is constrained."""
    if masks is None:
        return edited
    bound = [row for row, sequence in enumerate(sequences) if id(sequence) in masks.rows]
    if not bound:
        return edited
    masks.wait()
    bits = masks.bits[[masks.rows[id(sequences[row])] for row in bound]]
    there = sent(torch.tensor(bound), edited.device)
    is_allowed = allowed_on(edited.device, bits, edited.shape[-1])
    own = edited.index_select(0, there).masked_fill(~is_allowed, -torch.inf)
    return edited.index_copy(0, there, own)


def _scoring(sequences: Items[Sequence], vocab: int) -> dict[int, list[int]]:
    scoring: dict[int, list[int]] = {}
    for place, sequence in enumerate(sequences):
        wanted = sequence.request.logprobs
        if wanted is not None and wanted.top is not None:
            scoring.setdefault(min(wanted.top, vocab), []).append(place)
    return scoring
