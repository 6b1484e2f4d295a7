"""Chooses the next token of each row, exactly, and reports log-probabilities, which are of the raw distribution.

On a CPU each row is drawn as it is looked at (`Sampler.choose`). On a device the draws of a step are launched together
and looked at once (`launch`); the few that this leaves open are drawn as on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import isfinite, log
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from serve_app.engine.decoder.memory import HostCopy, StartHostCopy, sent
from serve_app.engine.sampling.candidates import block_weights, likeliest, sorted_largest, take_rows
from serve_app.engine.sampling.draw import Choice, Drawn, draw_fast, draw_tokens
from serve_app.engine.sampling.edits import edit_logits
from serve_app.engine.sampling.masks import StepMasks, is_allowed, restrict
from serve_app.engine.sampling.stages import steer
from serve_app.engine.scheduler.sequence import Batch, Sequence, Span


@dataclass(frozen=True, slots=True)
class Scored:
    """A token's log-probability and the likeliest tokens beside it, by falling log-probability.

    rank: how many tokens are at least as likely, itself included; None where nobody asked
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None


def score(logits: Tensor, targets: Items[int], num_top: int, *, ranked: bool = False) -> list[Scored]:
    """Score one target per row of logits, [rows, vocab] float32."""
    num_top, there = min(num_top, logits.shape[-1]), torch.tensor(targets, dtype=torch.int64, device=logits.device)
    found = [part.tolist() for part in scores_of(logits, there, num_top)]
    ranks = _ranks(logits, targets) if ranked else [None] * len(targets)
    return [
        Scored(target, logprob, tuple(zip(ids, tops, strict=True)), rank)
        for target, logprob, ids, tops, rank in zip(targets, *found, ranks, strict=True)
    ]


def scores_of(logits: Tensor, targets: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of targets, ids of the likeliest tokens, and theirs; looks at no number of a device.

    logits: [rows, vocab] float32;  targets: [rows] int64

    Returns [rows] float64, [rows, num_top] int64, [rows, num_top] float64.
    """
    totals = log_totals(logits)
    own = logits.gather(1, targets[:, None])[:, 0] - totals
    none = logits[:, :0]
    values, token_ids = sorted_largest(logits, num_top) if num_top else (none, none.long())
    return own, token_ids, values - totals[:, None]


def _ranks(logits: Tensor, targets: Items[int]) -> list[int]:
    """Count the tokens of each row that are at least as likely as its target, in the memory of one row."""
    return [int((own >= own[target]).sum()) for own, target in zip(logits, targets, strict=True)]


def log_totals(logits: Tensor) -> Tensor:
    """Return ln of each row's sum of exponentials; [rows, vocab] float32 -> [rows] float64"""
    rows = list(range(len(logits)))
    ones = torch.ones(len(rows), dtype=torch.float64, device=logits.device)
    sums, highest = block_weights(logits, rows, ones)
    return highest.double() + torch.log(torch.cumsum(sums, dim=-1)[:, -1])


FACTS = 5
"""Numbers of each row that are looked at: its token, three flags, the probability."""


Draw: TypeAlias = Drawn | Literal["exhausted"] | None
"""What a row gave. None: its logits are not numbers. Exhausted: something forbids whatever the constraint allows."""


@dataclass(frozen=True, slots=True)
class Launched:
    """Draws for some sequences, usual ones, on their way to the host.

    token_ids: [rows] int64, on the device; of a row that is open, or has no numbers, anything
    scoring:   by number of likeliest tokens, the rows whose log-probabilities come along
    """

    sequences: Items[Sequence]
    token_ids: Tensor
    scoring: dict[int, list[int]]
    landing: HostCopy

    def take(self, places: list[int]) -> Tensor:
        """Return the tokens at these places, on the device."""
        if places == list(range(len(self.sequences))):
            return self.token_ids
        return self.token_ids.index_select(0, sent(torch.tensor(places), self.token_ids.device))

    def tokens_on_device(self) -> list[int]:
        """Wait for them, and tell which tokens the device has, those of open rows too."""
        return [int(number) for number in self.landing.wait()[: len(self.sequences)].tolist()]

    def look(self) -> tuple[dict[int, Draw], dict[int, Scored], list[int]]:
        """Wait for what was drawn, by the sequence's identity, and how likely that was if somebody asked.

        The third are places of rows that have to be drawn where each stage is looked at.
        """
        numbers: list[float] = self.landing.wait().tolist()
        count = len(self.sequences)
        facts = [numbers[at * count : (at + 1) * count] for at in range(FACTS)]
        drawn: dict[int, Draw] = {}
        left = []
        rows = zip(self.sequences, *facts, strict=True)
        for place, (sequence, token_id, is_finite, has_numbers, is_settled, probability) in enumerate(rows):
            if not is_finite:
                drawn[id(sequence)] = "exhausted" if has_numbers else None
            elif is_settled:
                drawn[id(sequence)] = Drawn(int(token_id), probability)
            else:
                left.append(place)
        return drawn, self._scored(numbers[FACTS * count :], drawn), left

    def _scored(self, numbers: list[float], drawn: dict[int, Draw]) -> dict[int, Scored]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSpan:
    """What a step gave for one span.

    token_id: the drawn token; None where the span does not sample
    is_finite: False where the model gave no usable logits
    is_exhausted: the model gave some, and constraint, bans and what is allowed together leave no token
    scored:   log-probability of the drawn token, where asked for
    prompt:   of tokens start+1 … start+scores, where asked for: of the prompt, or forced ones
    """

    token_id: int | None = None
    is_finite: bool = True
    is_exhausted: bool = False
    scored: Scored | None = None
    prompt: tuple[Scored, ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """Draws of a step.

    usual:    sequences whose draws were launched, with their rows of the logits;  others: those that were not
    """

    logits: Tensor
    batch: Batch
    masks: StepMasks | None
    usual: Items[tuple[Sequence, int]]
    others: Items[tuple[Sequence, int]]
    launched: Launched | None


class Sampler:
    """Draws as each sequence's parameters say. What it remembers, it keeps in the sequences.

    eos_token_ids: the model's own end tokens, out of play for sequences that must not end yet
    land: brings what was chosen on a device to the host, once per step; None looks at it as it is computed, which costs
          nothing on a CPU
    """

    def __init__(self, eos_token_ids: frozenset[int] = frozenset(), *, land: StartHostCopy | None = None) -> None:
        self._eos_token_ids = eos_token_ids
        self._land = land

    @torch.inference_mode()
    def sample(self, logits: Tensor, batch: Batch, masks: StepMasks | None = None) -> list[SampledSpan]:
        """Draw for every span that samples.

        logits: [rows, vocab], rows as `Runner.forward` gives them; those of guesses are left alone
        masks:  of those that are constrained; waited for
        """
        return self.finish(self.begin(logits, batch, masks))

    @torch.inference_mode()
    def begin(self, logits: Tensor, batch: Batch, masks: StepMasks | None = None) -> Begun:
        """Begin with the draws of a step: all of the usual ones, where the host is not to look at each."""
        drawing = [
            (s.sequence, row + s.scores) for s, row in zip(batch.spans, batch.first_rows, strict=True) if s.samples
        ]
        usual = [each for each in drawing if self._land is not None and can_launch_ahead(each[0])]
        others = [each for each in drawing if self._land is None or not can_launch_ahead(each[0])]
        launched = None
        if self._land is not None and usual:
            sequences, rows = [sequence for sequence, _ in usual], take_rows(logits, [row for _, row in usual])
            edited = edit_logits(rows, sequences, self._eos_token_ids)
            launched = launch(rows, edited, sequences, masks, self._land)
        return Begun(logits, batch, masks, usual, others, launched)

    @torch.inference_mode()
    def finish(self, begun: Begun) -> list[SampledSpan]:
        """Wait for what was begun, and draw what is left."""
        drawn, scored, is_open = ({}, {}, []) if begun.launched is None else begun.launched.look()
        logits = begun.logits
        if left := [*(begun.usual[place] for place in is_open), *begun.others]:
            sequences, rows = [sequence for sequence, _ in left], take_rows(logits, [row for _, row in left])
            chosen = self.choose(rows, sequences, begun.masks)
            drawn |= {id(sequence): result for sequence, result in zip(sequences, chosen, strict=True)}
        spans = list(zip(begun.batch.spans, begun.batch.first_rows, strict=True))
        scored |= self._score_drawn(logits, spans, drawn, known=scored)
        return [self._report(span, logits, first, drawn, scored) for span, first in spans]

    @torch.inference_mode()
    def choose(self, logits: Tensor, sequences: Items[Sequence], masks: StepMasks | None = None) -> list[Draw]:
        """Draw one token per row and carry Mirostat's state on; None where no logit is finite.

        logits: [rows, vocab] float32; never changed
        masks:  of those rows that are constrained, or of more
        """
        edited = edit_logits(logits, sequences, self._eos_token_ids)
        best = likeliest(edited)  # of what is no number, if anything is
        bound = [] if masks is None else _bound_rows(best, sequences, masks)
        free = sorted(set(range(len(sequences))).difference(bound))
        drawn: dict[int, Draw] = {}
        drawn |= zip(free, self._choose(edited, [sequences[row] for row in free], free, best), strict=True)
        if masks is not None and bound:
            own = [sequences[row] for row in bound]
            bits = masks.bits[[masks.rows[id(sequence)] for sequence in own]]
            restricted = restrict(take_rows(edited, bound), bits)
            chosen = self._choose(restricted, own, list(range(len(own))), likeliest(restricted))
            drawn |= zip(bound, chosen, strict=True)
        for row, result in drawn.items():
            if result is None and bool(torch.isfinite(logits[row].amax())):  # there are numbers, and none is allowed
                drawn[row] = "exhausted"
        return [drawn[row] for row in range(len(sequences))]

    def _choose(self, edited: Tensor, sequences: Items[Sequence], rows: list[int], best: Tensor) -> list[Drawn | None]:
        """Draw for these rows of many; sequences: theirs; best: [all rows] the likeliest tokens"""
        is_finite = [isfinite(each) for each in edited.gather(1, best[:, None])[:, 0].tolist()]
        places = best.tolist()
        drawn: list[Drawn | None] = [
            _certain(places[row], sequence) if is_finite[row] else None
            for row, sequence in zip(rows, sequences, strict=True)
        ]
        random = [
            at
            for at, (row, sequence) in enumerate(zip(rows, sequences, strict=True))
            if is_finite[row] and not sequence.request.sampling.is_greedy
        ]
        if random:
            drawing = [sequences[at] for at in random]
            chosen = draw_tokens(edited, drawing, [rows[at] for at in random])
            for at, result in zip(random, chosen, strict=True):
                drawn[at] = result
                steer(sequences[at], result.probability)
        return drawn

    def _score_drawn(
        self,
        logits: Tensor,
        spans: Items[tuple[Span, int]],
        drawn: Mapping[int, Draw],
        *,
        known: Mapping[int, Scored],
    ) -> dict[int, Scored]:
        """Score drawn tokens where that was asked, by the sequence's identity; rows that want as much together."""
        wanted: dict[int, list[tuple[int, int, int]]] = {}
        for span, first in spans:
            asked, token = span.sequence.request.logprobs, drawn.get(id(span.sequence))
            if id(span.sequence) in known:
                continue
            if asked is not None and asked.top is not None and not asked.post_sampling and isinstance(token, Drawn):
                row = (id(span.sequence), first + span.scores, token.token_id)
                wanted.setdefault(asked.top, []).append(row)
        scored: dict[int, Scored] = {}
        for num_top, asking in wanted.items():
            identities, rows, targets = zip(*asking, strict=True)
            found = score(take_rows(logits, list(rows)), targets, num_top)
            scored |= zip(identities, found, strict=True)
        return scored

    def _report(
        self,
        span: Span,
        logits: Tensor,
        first: int,
        drawn: Mapping[int, Draw],
        scores: Mapping[int, Scored],
    ) -> SampledSpan:
        """Put together what the span's rows say; first: of its scored positions;  scores: of drawn tokens"""
        sequence = span.sequence
        wanted = sequence.request.logprobs
        prompt: tuple[Scored, ...] = ()
        if span.scores and wanted is not None:
            targets = sequence.token_ids[span.start + 1 : span.start + 1 + span.scores]
            ranked = wanted.whole_prompt is not None and not span.decodes
            num_top = wanted.top or 0 if span.decodes else wanted.prompt_top
            rows = logits[first : first + span.scores]
            prompt = tuple(score(rows, targets, num_top, ranked=ranked))
        if not span.samples:
            return SampledSpan(prompt=prompt)
        found = drawn[id(sequence)]
        if found is None:
            return SampledSpan(is_finite=False, prompt=prompt)
        if found == "exhausted":
            return SampledSpan(is_exhausted=True, prompt=prompt)
        if wanted is None or wanted.top is None:
            return SampledSpan(token_id=found.token_id, prompt=prompt)
        post = Scored(found.token_id, log(found.probability), found.top) if wanted.post_sampling else None
        return SampledSpan(token_id=found.token_id, scored=post or scores[id(sequence)], prompt=prompt)


def _bound_rows(best: Tensor, sequences: Items[Sequence], masks: StepMasks) -> list[int]:
    """Return rows whose constraints matter to the draw: a greedy row only if its likeliest token is forbidden."""
    masks.wait()
    found = []
    for row, (token_id, sequence) in enumerate(zip(best.tolist(), sequences, strict=True)):
        place = masks.rows.get(id(sequence))
        if place is None or (sequence.request.sampling.is_greedy and is_allowed(masks.bits[place], token_id)):
            continue
        found.append(row)
    return found


def _certain(token_id: int, sequence: Sequence) -> Drawn:
    """Return a greedy choice: a distribution of one token."""
    wanted = sequence.request.logprobs
    return Drawn(token_id, 1.0, ((token_id, 0.0),) if wanted is not None and wanted.top else ())


def can_launch_ahead(sequence: Sequence) -> bool:
    """Say whether a sequence's draw is known by its token alone, so that the next step can be launched behind it.

    Mirostat is steered by what was drawn; XTC alone needs every token in view as a rule; the distribution that is drawn
    from is told by a look at it.
    """
    params, wanted = sequence.request.sampling, sequence.request.logprobs
    if wanted is not None and wanted.post_sampling:
        return False
    return params.is_greedy or not (params.mirostat or params.xtc_probability)


def launch(
    logits: Tensor, edited: Tensor, sequences: Items[Sequence], masks: StepMasks | None, land: StartHostCopy
) -> Launched:
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
        targets = choice.token_ids.index_select(0, there)
        own, token_ids, tops = scores_of(logits.index_select(0, there), targets, num_top)
        numbers += [own, token_ids.double().flatten(), tops.flatten()]
    return Launched(sequences, choice.token_ids, scoring, land(torch.cat(numbers)))


def _chosen(edited: Tensor, best: Tensor, sequences: Items[Sequence]) -> Choice:
    """Choose the likeliest tokens of greedy sequences, and draw for the others."""
    certain = Choice(best, torch.ones(len(best), dtype=torch.float64, device=best.device), torch.ones_like(best).bool())
    random = [row for row, sequence in enumerate(sequences) if not sequence.request.sampling.is_greedy]
    if not random:
        return certain
    there = sent(torch.tensor(random), best.device)
    drawn = draw_fast(edited, [sequences[row] for row in random], random)
    return Choice(
        certain.token_ids.index_copy(0, there, drawn.token_ids),
        certain.probabilities.index_copy(0, there, drawn.probabilities),
        certain.is_settled.index_copy(0, there, drawn.is_settled),
    )


def _restricted(edited: Tensor, sequences: Items[Sequence], masks: StepMasks | None) -> Tensor:
    """Return a copy in which what constraints do not allow is -inf; the same if none of these rows is constrained."""
    if masks is None:
        return edited
    bound = [row for row, sequence in enumerate(sequences) if id(sequence) in masks.rows]
    if not bound:
        return edited
    masks.wait()
    bits = masks.bits[[masks.rows[id(sequences[row])] for row in bound]]
    there = sent(torch.tensor(bound), edited.device)
    return edited.index_copy(0, there, restrict(edited.index_select(0, there), bits))


def _scoring(sequences: Items[Sequence], vocab: int) -> dict[int, list[int]]:
    scoring: dict[int, list[int]] = {}
    for place, sequence in enumerate(sequences):
        wanted = sequence.request.logprobs
        if wanted is not None and wanted.top is not None:
            scoring.setdefault(min(wanted.top, vocab), []).append(place)
    return scoring
