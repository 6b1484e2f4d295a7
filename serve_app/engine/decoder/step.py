"""One step as the model sees it: packed tokens, where their keys and values go, and what they attend to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_app.engine.decoder.host_copies import sent
from serve_app.engine.kv.storage import AttentionPlan, Reading, Storage
from serve_app.engine.lora.plan import Mix
from serve_app.engine.scheduler.sequence import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Illustrated:
    """As `Step` says; all None where no token is part of an image and none comes behind one."""

    embeddings: Tensor | None = None
    illustrated: Tensor | None = None
    rope_positions: Tensor | None = None


def lay_images(batch: Batch, positions: Sequence[int], *, device: torch.device) -> Illustrated:
    """Gather the rows of images in a batch's spans. positions: of all its tokens"""
    if all(span.sequence.illustration is None for span in batch.spans):
        return Illustrated()
    at: list[int] = []
    rows: list[Tensor] = []
    rotated: list[tuple[int, Tensor]] = []
    first = 0
    for span in batch.spans:
        held = span.sequence.illustration
        if held is not None:
            end = span.start + span.num_computed
            own_positions, own = held.between(span.start, end)
            at += [first + position - span.start for position in own_positions]
            rows.append(own)
            if (rope_positions := held.rope_between(span.start, end)) is not None:
                rotated.append((first, rope_positions))
        first += span.num_computed
    return Illustrated(
        embeddings=torch.cat(rows) if at else None,
        illustrated=torch.tensor(at, device=device) if at else None,
        rope_positions=_rope_positions(positions, rotated).to(device) if rotated else None,
    )


def _rope_positions(positions: Sequence[int], rotated: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Of the tokens that are none of these, all three are the position."""
    rope_positions = torch.tensor(positions).expand(3, -1).clone()
    for first, own in rotated:
        rope_positions[:, first : first + own.shape[1]] = own
    return rope_positions


NO_IMAGES = Illustrated()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """All that a forward needs beside the weights. Whoever runs one is handed it whole; nothing is set aside for it.

    token_ids, positions: [tokens] int64
    places:     [tokens] int64, where keys and values are written, as the storage counts them
    logit_rows: [rows] int64, the tokens whose logits are wanted: of each span its scored positions, then its last and
                the guesses behind that
    mixes:      [tokens], the adapters' slots of each with their factors, () for the base
    logit_mixes: [rows], the same of the tokens whose logits are wanted
    attention:  what every layer asks to write its keys and values, and to attend
    embeddings: [illustrated, hidden], in the place of the ids of the tokens `illustrated`, [illustrated] int64; None
                where no token is part of an image
    rope_positions: [3, tokens] int64, by which tokens are rotated in the place of `positions`; None where these say all
    """

    token_ids: Tensor
    positions: Tensor
    places: Tensor
    logit_rows: Tensor
    mixes: tuple[Mix, ...]
    attention: AttentionPlan
    logit_mixes: tuple[Mix, ...] = ()
    embeddings: Tensor | None = None
    illustrated: Tensor | None = None
    rope_positions: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A step before any tensor of it is made: all that a process beside this one has to be told to compute it, too.

    As in `Step`; readings: what is attended to, span by span
    """

    token_ids: list[int]
    positions: list[int]
    places: list[int]
    logit_rows: list[int]
    mixes: tuple[Mix, ...]
    readings: tuple[Reading, ...]

    def step(self, storage: Storage, *, device: torch.device, images: Illustrated = NO_IMAGES) -> Step:
        """One tensor per field, all of them sent at once."""
        fields = (self.token_ids, self.positions, self.places, self.logit_rows)
        numbers = torch.tensor([*fields[0], *fields[1], *fields[2], *fields[3]], dtype=torch.int64)
        token_ids, positions, written, logit_rows = sent(numbers, device).split([len(field) for field in fields])
        return Step(
            token_ids=token_ids,
            positions=positions,
            places=written,
            logit_rows=logit_rows,
            mixes=self.mixes,
            logit_mixes=tuple(self.mixes[row] for row in self.logit_rows),
            attention=storage.plan(self.readings, written),
            embeddings=images.embeddings,
            illustrated=images.illustrated,
            rope_positions=images.rope_positions,
        )


def pack(batch: Batch, storage: Storage) -> Layout:
    """Lay a batch out: one pass over its spans."""
    token_ids: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    logit_rows: list[int] = []
    mixes: list[Mix] = []
    readings: list[Reading] = []
    for span in batch.spans:
        sequence, holding = span.sequence, span.sequence.place.holding
        assert holding is not None, f"{sequence} has no place"
        first = len(token_ids)
        end, length = span.start + span.num_computed, span.num_computed
        token_ids += (*sequence.token_ids[span.start : span.end], *span.draft)
        positions += range(span.start, end)
        places += storage.places(holding, span.start, end)
        mixes += [sequence.place.mix] * length
        logit_rows += range(first, first + span.scores)
        if span.samples:
            logit_rows += range(first + span.length - 1, first + length)
        readings.append(
            Reading(
                first_token=first,
                place=holding.place,
                blocks=holding.blocks,
                start=span.start,
                length=length,
                names=() if storage.shares_held else holding.names,  # of pages nobody has a copy to look for
            )
        )
    return Layout(
        token_ids=token_ids,
        positions=positions,
        places=places,
        logit_rows=logit_rows,
        mixes=tuple(mixes),
        readings=tuple(readings),
    )


class CurrentStep:
    """Hands the step to modules inside a model whose own code hands nothing on: attention and adapted linears.

    The one place where that is known; a decoder loop of our own passes the step itself.
    """

    def __init__(self) -> None:
        self._step: Step | None = None

    @property
    def step(self) -> Step:
        assert self._step is not None, "used outside of a step"
        return self._step

    @contextmanager
    def running(self, step: Step) -> Iterator[None]:
        """Within it, `step` is this one."""
        self._step = step
        try:
            yield
        finally:
            self._step = None
