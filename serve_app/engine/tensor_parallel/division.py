"""Divides a model among shards by whole heads and equal parts of the MLP, or refuses it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from serve_app.engine.decoder.config_check import CheckedConfig, shapes_of
from serve_app.engine.decoder.text_part import FAMILIES, ModelNotSupported, text_config
from serve_app.engine.lora.adapter import LowRank
from serve_app.engine.vision.support import VisionSupport

Range: TypeAlias = tuple[int, int]
"""From … to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The shard's part of a linear's weight [outputs, inputs].

    along:  which of the two is cut
    ranges: what the shard has of it, one behind the other
    """

    along: Literal["outputs", "inputs"]
    ranges: tuple[Range, ...]

    @property
    def part_size(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    def weight(self, whole: Any) -> Tensor:
        """Return the shard's part as a new tensor. whole: a tensor, or a slice of a file, of which no more is read."""
        if self.along == "outputs":
            return torch.cat([whole[begin:end] for begin, end in self.ranges])
        return torch.cat([whole[:, begin:end] for begin, end in self.ranges], dim=1)

    def bias(self, whole: Any, *, is_first: bool) -> Tensor:
        """Return the shard's part of a bias. Of a bias that is added to a sum only the first shard has one."""
        if self.along == "outputs":
            return self.weight(whole)
        bias: Tensor = whole[:]
        return bias if is_first else torch.zeros_like(bias)

    def part_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the shard's part of a weight or bias."""
        if self.along == "outputs":
            return (self.part_size, *shape[1:])
        return shape if len(shape) == 1 else (shape[0], self.part_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Which part of a model a shard has.

    number: of this shard, from 0;  count: of all shards
    heads, key_heads: of queries, and of keys or values;  head_dim: of each;  inner: size of the MLP; all of the whole
    """

    number: int
    count: int
    heads: int
    key_heads: int
    head_dim: int
    inner: int

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def of(self, number: int) -> Division:
        """Return the division of another shard."""
        return replace(self, number=number)

    def cut(self, name: str) -> Cut | None:
        """Return the shard's part of the linear of that name; None if it has all of it."""
        parent, _, kind = name.rpartition(".")
        if parent.endswith(".self_attn"):
            return self._cut_of_attention(kind)
        if parent.endswith(".mlp"):
            return self._cut_of_mlp(kind)
        return None

    def narrowed(self, checked: CheckedConfig) -> CheckedConfig:
        """Return the model as the shard computes it: with fewer heads and a smaller MLP."""
        config = deepcopy(checked.config)
        text = text_config(config)
        text.head_dim = self.head_dim
        text.num_attention_heads = self.heads // self.count
        text.num_key_value_heads = self._part_key_heads
        text.intermediate_size = self.inner // self.count
        return replace(checked, config=config, text=text)

    @property
    def _part_key_heads(self) -> int:
        return max(1, self.key_heads // self.count)

    def _cut_of_attention(self, kind: str) -> Cut | None:
        queries = self._heads(self.number * (self.heads // self.count), self.heads // self.count)
        keys = self._heads(self.number * self.key_heads // self.count, self._part_key_heads)
        width, key_width = self.heads * self.head_dim, self.key_heads * self.head_dim
        match kind:
            case "q_proj":
                return Cut(along="outputs", ranges=(queries,))
            case "k_proj" | "v_proj":
                return Cut(along="outputs", ranges=(keys,))
            case "qkv_proj":
                ranges = (queries, _moved(keys, width), _moved(keys, width + key_width))
                return Cut(along="outputs", ranges=ranges)
            case "o_proj":
                return Cut(along="inputs", ranges=(queries,))
            case _:
                return None

    def _cut_of_mlp(self, kind: str) -> Cut | None:
        size = self.inner // self.count
        own = (self.number * size, (self.number + 1) * size)
        match kind:
            case "gate_proj" | "up_proj":
                return Cut(along="outputs", ranges=(own,))
            case "gate_up_proj":
                return Cut(along="outputs", ranges=(own, _moved(own, self.inner)))
            case "down_proj":
                return Cut(along="inputs", ranges=(own,))
            case _:
                return None

    def _heads(self, first: int, count: int) -> Range:
        return first * self.head_dim, (first + count) * self.head_dim


def divide(checked: CheckedConfig, count: int, *, number: int = 0, weights: str | None = None) -> Division:
    """Divide a model among so many shards.

    weights: in how few bits they were asked for

    Raises ModelNotSupported, which names what is in the way.
    """
    text, asked = checked.text, f"tensor_parallel: {count}"
    if str(text.model_type) not in FAMILIES:
        raise ModelNotSupported(f"{asked}: models of type {text.model_type} are not divided; take one replica for each")
    if weights is not None or checked.formats is not None:
        raise ModelNotSupported(f"{asked}: weights in few bits are not divided; leave one of the two")
    if isinstance(checked.vision, VisionSupport):
        raise ModelNotSupported(f"{asked}: a model that sees is not divided; with `images: false` it is, for text")
    heads = int(text.num_attention_heads)
    division = Division(
        number=number,
        count=count,
        heads=heads,
        key_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        inner=int(text.intermediate_size),
    )
    _check_even(division)
    _check_shapes(checked, division)
    return division


def _check_even(division: Division) -> None:
    count = division.count
    for size, what in ((division.heads, "heads of queries"), (division.inner, "columns of the MLP")):
        if size % count:
            raise ModelNotSupported(
                f"tensor_parallel: {count} does not divide the model's {size} {what}; take a divisor"
            )
    if division.key_heads % count and count % division.key_heads:
        raise ModelNotSupported(
            f"tensor_parallel: {count} neither divides the model's {division.key_heads} heads of keys, nor is a"
            " multiple of it"
        )


def _check_shapes(checked: CheckedConfig, division: Division) -> None:
    """Check that each weight of the smaller model has the shape of its part."""
    whole = {name: tuple(each.shape) for name, each in shapes_of(checked).named_parameters()}
    part = {name: tuple(each.shape) for name, each in shapes_of(division.narrowed(checked)).named_parameters()}
    for name, shape in whole.items():
        cut = division.cut(name.rpartition(".")[0])
        expected = shape if cut is None else cut.part_of(shape)
        if part.get(name) != expected:
            raise ModelNotSupported(
                f"tensor_parallel: {division.count}: {name} {list(shape)} cannot be divided: all heads share it"
            )


def _moved(own: Range, by: int) -> Range:
    return own[0] + by, own[1] + by


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The shard's part of a stored tensor, read by `part[...]`, as a slice of a safetensors file is."""

    stored: Any
    cut: Cut | None
    is_bias: bool
    is_first: bool

    def __getitem__(self, index: Any) -> Tensor:
        if self.cut is None:
            whole: Tensor = self.stored[index]
            return whole
        read = self.cut.bias(self.stored, is_first=self.is_first) if self.is_bias else self.cut.weight(self.stored)
        return read[index]


def parts_of(slices: Mapping[str, Any], division: Division) -> dict[str, Part]:
    """Return the shard's part of each tensor of a checkpoint, by name."""
    parts: dict[str, Part] = {}
    for name, stored in slices.items():
        module, _, kind = name.rpartition(".")
        cut, is_bias = division.cut(module), kind == "bias"
        parts[name] = Part(stored=stored, cut=cut, is_bias=is_bias, is_first=division.is_first)
    return parts


def part_of(weights: Mapping[str, LowRank], division: Division) -> dict[str, LowRank]:
    """Return a shard's part of an adapter: of `up` if a module's outputs are cut, else of `down`."""
    parts = {}
    for name, each in weights.items():
        cut = division.cut(name)
        if cut is None:
            parts[name] = each
        elif cut.along == "outputs":
            parts[name] = replace(each, up=cut.weight(each.up))
        else:
            parts[name] = replace(each, down=cut.weight(each.down))
    return parts
