"""All layers of a step in one call: what the loop would ask of kernels one after the other, laid out once.

The interpreter takes a tenth of a step that decodes between kernels, and each of them wakes the other threads anew.
Steps of many tokens, and layers with anything that is not a kernel of ours, are the loop's.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from serve_app.engine.cpu import low_rank
from serve_app.engine.cpu.calling import Kernel, float_bits
from serve_app.engine.cpu.products import num_parts
from serve_app.engine.cpu.rows_plan import Attending, Lanes, RowsPlan
from serve_app.engine.cpu.sequence import Call, CallSequence, carrier
from serve_app.engine.cpu.tokens import TokenKernels, token_kernels
from serve_app.engine.decoder.layer import Heads, Layer, Rotation
from serve_app.engine.decoder.norm import Change, RootMeanSquare
from serve_app.engine.decoder.openmp import are_asleep
from serve_app.engine.decoder.program_parts import MOST_ROWS, Buffers, Parts
from serve_app.engine.decoder.step import Step
from serve_app.engine.kv.plan import Scoring
from serve_app.engine.lora.modules import Parts as Changes
from serve_app.engine.lora.plan import ShelfTiles

logger = logging.getLogger(__name__)

Finish: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Gives the stream behind the last layer of that before its attention and what this gives, [tokens, …] both, for the
rows whose logits are wanted."""
ALONE = 3 << 19
"""Pairs of numbers, in an average call, that one thread multiplies sooner than it wakes another that is asleep. On two
cores with nobody else there two threads take 1.28 and 1.13 times as long for a fifth and a quarter of it, 0.97 for 0.8
of it (where others take the cores 1.09), 0.95 for 1.3 and 0.69 for four times as many."""
FEW_ROWS = 11
"""As long as these take to be multiplied it takes to read the weights."""
MOST_MADE = 8
"""Ranks of a step's adapters, in their order, that calls are kept for at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What calls are laid out for.

    is_decoding: whether attention writes keys and values in passing
    rotated:     dimensions of a head;  ranks: of each of a step's tiles of adapters
    stacks:      other numbers where adapters' factors lie elsewhere
    """

    storage: Lanes
    is_decoding: bool
    rotated: int
    num_threads: int
    ranks: tuple[int, ...]
    stacks: tuple[int, ...]


class Made:
    """The calls of all layers, and which of them a step tells what.

    attended: how many calls there are up to the last layer's attention
    """

    def __init__(self, carrier: Kernel, layers: Sequence[Sequence[tuple[int, Call]]]) -> None:
        """layers: calls, each with the number of its tiles"""
        from serve_app.engine.cpu.product_kernel import BLOCK

        calls = [each for layer in layers for each in layer]
        self.sequence = CallSequence(carrier, [call for _, call in calls])
        found: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for at, (number, call) in enumerate(calls):
            for name in ("num_tokens", "num_rows", "cos", "items", "num_tiles", "places"):
                if name in call.names:
                    found[name, number].append(at)
        self._of = {name: torch.tensor(numbers) for name, numbers in found.items()}
        self.attended = found["items", 0][-1] + 1
        self.num_rows = 0
        blocks = sum(call.given.get("num_groups", 0) * call.given.get("num_blocks", 0) for _, call in calls)
        self._num_pairs = BLOCK * blocks / len(calls)  # of a row, in an average call

    def run(self, num_calls: int) -> None:
        """The first of them. Where threads are asleep, as others want the CPUs, small ones are one thread's."""
        is_small = self._num_pairs * max(self.num_rows, FEW_ROWS) <= ALONE
        self.sequence(num_calls, is_alone=is_small and are_asleep())

    def put(self, known_by: str, number: int = 0, **parameters: int | Tensor) -> None:
        """Into the calls that have a parameter of that name: one number for all, or as many as there are calls."""
        if (known_by, number) in self._of:
            self.sequence.put(self._of[known_by, number], **parameters)


class Program:
    """The layers of one decoder.

    parts: of each layer
    """

    def __init__(self, carrier: Kernel, tokens: TokenKernels, layers: Sequence[Layer], parts: Sequence[Parts]) -> None:
        self._carrier = carrier
        self._tokens = tokens
        self._parts = parts
        attention = layers[0].attention
        self._heads: Heads = attention.heads
        self._scoring: Scoring = attention.scoring
        self.rope = str(attention.rope)
        self._buffers = Buffers(attention.heads, parts[0])
        self._made: dict[Form, Made] = {}
        adapted = [changes for each in parts for changes in each.changes if changes.step is not None]
        self._adapted: Changes | None = adapted[0] if adapted else None

    @classmethod
    def find(cls, layers: Sequence[Layer]) -> Program | None:
        """For layers that differ in nothing but their weights; None where a call in between would be another's."""
        found = [Parts.find(layer) for layer in layers]
        parts = [each for each in found if each is not None]
        forms = {(_form(layer), each.form) for layer, each in zip(layers, parts, strict=False)}
        if len(parts) < len(layers) or len(forms) != 1:
            return None
        tokens, runs = token_kernels(torch.bfloat16), carrier()
        if tokens is None or runs is None:
            return None
        sizes = [each.num_outputs for each in parts[0].products]
        sizes += [sizes[2] // 2] if parts[0].of_heads is None else [sizes[2] // 2, layers[0].attention.heads.dim]
        if not all(tokens.gives(size) for size in sizes):
            return None
        program = cls(runs, tokens, layers, parts)
        return program if None not in [calls for each in parts for calls in program._buffers.products(each)] else None

    def form_of(self, step: Step, x: Tensor, rotation: Rotation) -> tuple[Form, Attending] | None:
        """What the step needs, if it is one for this; None for the loop's. x: [tokens, hidden]"""
        plan, count = step.attention, len(x)
        if not isinstance(plan, RowsPlan) or count > MOST_ROWS or x.dtype != torch.bfloat16:
            return None
        query, turned = self._buffers.heads(self._heads)[0], self._buffers.turned(self._heads, count)
        attending = plan.attending(query, self._scoring)
        if attending is None or not self._tokens.turns(turned, rotation.cos, rotation.sin):
            return None
        if any(step.mixes) and self._tiles is None:
            return None
        ranks = tuple(each.rank for each in self._tiles or ())
        stacks = self._adapted.num_changes if ranks and self._adapted is not None else ()
        form = Form(
            storage=attending.storage, is_decoding=attending.is_decoding, rotated=rotation.cos.shape[-1],
            num_threads=torch.get_num_threads(), ranks=ranks, stacks=stacks,
        )  # fmt: skip
        return form, attending

    @property
    def _tiles(self) -> tuple[ShelfTiles, ...] | None:
        """Of the step's rows that adapters change; None where there are none, or they are not our kernel's."""
        step = None if self._adapted is None else self._adapted.step
        is_ours = step is not None and isinstance(step.kernels, low_rank.LowRankKernels)
        return step.tiles if step is not None and is_ours else None

    def run(self, x: Tensor, rotation: Rotation, form: Form, attending: Attending, finish: Finish | None) -> Tensor:
        """The stream behind the last layer, [rows, hidden], until the next run, of x, the one before the first, which
        stays as it is.

        finish: computes what follows the last layer's attention; None has it computed here, of all tokens
        """
        made, count = self._made_for(form, attending), len(x)
        if count != made.num_rows:
            made.num_rows = count
            made.put("num_tokens", num_tokens=count)
            made.put("num_rows", num_rows=count, num_parts=num_parts(count))
        made.put("cos", cos=rotation.cos.data_ptr(), sin=rotation.sin.data_ptr())
        made.put("items", **attending.kernel.parameters_of(attending.table, self._heads.num_keys))
        made.put("places", places=attending.places.data_ptr())
        for number, each in enumerate(self._tiles or ()):
            made.put("num_tiles", number, **low_rank.parameters_of(each))
        stream = self._buffers.stream[:count].copy_(x)
        if finish is not None:
            made.run(made.attended)
            return finish(stream, self._buffers.attended[:count])
        made.run(len(made.sequence))
        Change(amount=self._buffers.change[:count], factor=self._parts[-1].residual).add_to(stream)
        return stream

    def _made_for(self, form: Form, attending: Attending) -> Made:
        """The calls of such steps; those of stacks that are gone are forgotten."""
        if form not in self._made:
            kept = {each: made for each, made in self._made.items() if each.stacks in ((), form.stacks)}
            self._made = kept if len(kept) < MOST_MADE and form.num_threads == torch.get_num_threads() else {}
            made = self._made[form] = Made(self._carrier, [self._layer(each, form, attending) for each in self._parts])
            memory = [form.storage.all_positions(number) for number in range(len(self._parts))]
            keys, values = (torch.tensor([both[at].data_ptr() for both in memory]) for at in range(2))
            made.put("items", keys=keys, values=values)
            made.put("places", keys=keys, values=values)
        return self._made[form]

    def _layer(self, parts: Parts, form: Form, attending: Attending) -> list[tuple[int, Call]]:
        """A layer's calls, in their order, each with the number of its tiles."""
        has = self._buffers
        inputs, given, spread, gathered = self._products(parts, form.ranks)
        gate = self._tokens.call(
            "gate", inputs=has.spread.data_ptr(), output=has.gated.data_ptr(), size=has.gated.shape[1]
        )
        turn = [(0, call) for call in has.turning(self._tokens, self._heads, parts.of_heads, form.rotated)]
        attend = [(0, call) for call in self._attend(form, attending)]
        first = self._norm(parts.norms[0], parts, is_first=parts is self._parts[0])
        second = self._norm(parts.norms[1], parts, is_first=False)
        return [(0, first), *inputs, *turn, *attend, *given, (0, second), *spread, (0, gate), *gathered]

    def _attend(self, form: Form, attending: Attending) -> list[Call]:
        """Keys and values are written by themselves where queries of one sequence see each other's."""
        has, num_heads, scale = self._buffers, self._heads.num_keys, self._scoring.scale
        query, key, value = has.heads(self._heads)
        if form.is_decoding:
            return [attending.kernel.call(query, has.attended, (key, value), num_heads=num_heads, scale=scale)]
        keep = self._tokens.call(
            "keep", key=key.data_ptr(), value=value.data_ptr(), stride=has.projected.stride(0),
            size=num_heads * self._heads.dim,
        )  # fmt: skip
        return [keep, attending.kernel.call(query, has.attended, None, num_heads=num_heads, scale=scale)]

    def _products(self, parts: Parts, ranks: Sequence[int]) -> list[list[tuple[int, Call]]]:
        """The calls of each, and of what adapters of such ranks change of it."""
        found = []
        places = self._buffers.of_products
        for calls, changes, (x, y) in zip(self._buffers.products(parts), parts.changes, places, strict=True):
            whole = [(0, call) for call in calls or ()]
            if ranks and changes.step is not None and changes.step.kernels is not None:
                adding = changes.added_by(changes.step.kernels)
                assert isinstance(adding, low_rank.LowRankChanges), "the kernels are ours"
                whole += adding.calls(y, x, ranks)
            found.append(whole)
        return found

    def _norm(self, norm: RootMeanSquare, parts: Parts, *, is_first: bool) -> Call:
        """Of the stream, with the change before it, which the first norm of all has not."""
        has, (weight, eps) = self._buffers, norm.parameters
        given = {
            "stream": has.stream.data_ptr(), "output": has.normed.data_ptr(), "weight": weight.data_ptr(),
            "size": has.stream.shape[1], "eps": float_bits(eps),
        }  # fmt: skip
        if is_first:
            return self._tokens.call("norm", **given)
        factor = float_bits(parts.residual)
        return self._tokens.call("add_and_norm", **given, change=has.change.data_ptr(), factor=factor)


class Shortcut:
    """Computes layers by a program where there is one for the step, which is tried beside the loop first."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._program = Program.find(layers)
        self._tried: set[tuple[bool, bool]] = set()  # whether steps decode alone, and have adapters

    def stream(
        self,
        step: Step,
        x: Tensor,
        rotations: Mapping[str, Rotation],
        *,
        by_layers: Callable[[Tensor], Tensor],
        finish: Finish,
    ) -> Tensor:
        """What the layers make of x [tokens, hidden], which may be changed, for the rows whose logits are wanted; the
        same to the last bit either way.

        finish: what `by_layers` ends with
        """
        program = self._program
        if program is None:
            return by_layers(x)
        rotation = rotations[program.rope]
        found = program.form_of(step, x, rotation)
        if found is None:
            return by_layers(x)
        form, attending = found
        wants_all = step.logit_rows.tolist() == list(range(len(x)))
        ours = program.run(x, rotation, form, attending, None if wants_all else finish)
        kind = form.is_decoding, bool(form.ranks)
        if kind in self._tried:
            return ours
        self._tried.add(kind)
        ours = ours.clone()
        expected = by_layers(x)
        if not torch.equal(ours, expected):
            logger.warning("layers are computed one kernel after the other: as a whole they give something else")
            self._program = None
        return expected


def _form(layer: Layer) -> tuple[object, ...]:
    """What layers have to have in common whose calls are to differ in nothing but weights."""
    attention, scoring = layer.attention, layer.attention.scoring
    weighing = scoring.scale, scoring.window, scoring.chunk, scoring.softcap
    return attention.heads, weighing, attention.rope, layer.residual
