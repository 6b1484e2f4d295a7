"""One step as the model sees it: packed tokens, where their keys and values go, and how its modules attend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from serve_app.engine.decoder.memory import sent
from serve_app.engine.decoder.text_part import query_scale, scales_queries
from serve_app.engine.decoder.transformers_private import unregister
from serve_app.engine.kv.storage import AttentionPlan, KeyValueShape, Reading, Storage
from serve_app.engine.lora.plan import Mix
from serve_app.engine.scheduler.sequence import Batch
from serve_app.kernels.forms import Scoring


@dataclass(frozen=True, slots=True, kw_only=True)
class Illustrated:
    """The images of a step; all None where no token is part of an image and none comes behind one.

    embeddings: [illustrated, hidden], in the place of the ids of the tokens `illustrated`, [illustrated] int64
    rope_positions: [3, tokens] int64, by which tokens are rotated in the place of their positions
    """

    embeddings: Tensor | None = None
    illustrated: Tensor | None = None
    rope_positions: Tensor | None = None

    def put_into(self, embedded: Tensor) -> Tensor:
        """Return embedded tokens, [tokens, hidden], with the images' embeddings in their places."""
        if self.embeddings is None or self.illustrated is None:
            return embedded
        return embedded.index_copy(0, self.illustrated, self.embeddings)


NO_IMAGES = Illustrated()


def lay_images(batch: Batch, positions: Sequence[int], *, device: torch.device) -> Illustrated:
    """Gather the rows of images in a batch's spans. positions: of all its tokens"""
    if all(span.sequence.illustration is None for span in batch.spans):
        return NO_IMAGES
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
    """Return the rope positions of all tokens; without an image's own, all three are the token's position."""
    rope_positions = torch.tensor(positions).expand(3, -1).clone()
    for first, own in rotated:
        rope_positions[:, first : first + own.shape[1]] = own
    return rope_positions


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
    """

    token_ids: Tensor
    positions: Tensor
    places: Tensor
    logit_rows: Tensor
    mixes: tuple[Mix, ...]
    attention: AttentionPlan
    logit_mixes: tuple[Mix, ...] = ()
    images: Illustrated = NO_IMAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A step before its tensors are made: all that another process needs to compute its shard of it.

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
            images=images,
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


_numbers = count()


class Unfit(ValueError):
    """A layer asks for an attention that the engine does not compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a layer's attention does beyond its arguments. It is read from the module once, not at every step.

    chunk: how many positions make one chunk, where queries see nothing before their own chunk (Llama 4)

    Raises Unfit if the attention is not causal.
    """

    scales_queries: bool
    chunk: int | None

    @classmethod
    def of(cls, layer: Any) -> Rules:
        if not getattr(layer, "is_causal", True):
            raise Unfit("attention that is not causal is not supported")
        config: Any = getattr(layer, "config", None)
        types = getattr(config, "layer_types", None) or {}
        is_chunked = bool(types) and types[layer.layer_idx] == "chunked_attention"
        return cls(scales_queries=scales_queries(layer), chunk=config.attention_chunk_size if is_chunked else None)


class PackedAttention:
    """The attention function of one engine. A model's attention modules find it by `name`.

    Each layer is handed on to the step's plan. Nothing is masked by the model itself.
    """

    def __init__(self, current: CurrentStep, shape: KeyValueShape) -> None:
        self.name = f"serve_app_packed_{next(_numbers)}"
        self._shape = shape
        self._current = current
        self._rules: dict[int, Rules] = {}
        ALL_ATTENTION_FUNCTIONS.register(self.name, self)

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend.

        module: of a family's own kind, with what that has
        query: [1, heads, tokens, key_dim];  key, value: [1, kv_heads, tokens, dim]
        Returns [1, tokens, heads, value_dim]. Raises Unfit.
        """
        if attention_mask is not None:
            raise Unfit("the model makes attention masks of its own")
        step, layer = self._current.step, int(module.layer_idx)
        rules = self._rules.get(layer) or self._rules.setdefault(layer, Rules.of(module))
        tokens = query[0].transpose(0, 1)  # [tokens, heads, key_dim]
        if rules.scales_queries:
            tokens = (tokens * query_scale(module, step.positions)[:, None, None]).to(tokens.dtype)
        is_reader = layer in self._shape.readers
        output = step.attention.run(
            self._shape.places.get(layer, layer),
            tokens,
            None if is_reader else key[0].transpose(0, 1),
            None if is_reader else value[0].transpose(0, 1),
            scoring=Scoring(
                scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
                window=sliding_window,
                chunk=rules.chunk,
                softcap=softcap,
                sinks=s_aux,
            ),
        )
        return output[None], None

    def close(self) -> None:
        """Forget the function; the model it was given to has none then."""
        unregister(ALL_ATTENTION_FUNCTIONS, self.name)
