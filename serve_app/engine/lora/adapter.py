"""Binds an adapter to a model: which weights it changes and how, or why it does not fit."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from serve_app.core.cards import AdapterRecord
from serve_app.engine.decoder.linears import LinearPart, PackedLinear
from serve_app.engine.decoder.quantized_linear import QuantisedLinear
from serve_app.engine.lora.matching import (
    MERGE,
    PREFIX,
    AdapterRefused,
    Matched,
    Matcher,
    Target,
    converted,
    text_modules,
)


class WeightsFile:
    """A file that is read again each time its adapter moves in, and must have the contents that were registered.

    It is copied by plain reads, never mapped: a mapped file that somebody truncates ends the process (SIGBUS), a
    short read is an error like any other. What the file system says of the file decides nothing. So an operator may

    - replace the file by an equal one (another inode, other times): nothing happens;
    - replace it by another, atomically or in place: the adapter keeps its slot while it has one, and what moves in
      afterwards fails with a reason, until the adapter is registered anew under its new version;
    - truncate or remove it: the same.

    digest: SHA-256 of the contents, in hexadecimal digits
    """

    def __init__(self, path: Path, digest: str) -> None:
        self.path = path
        self._digest = digest
        self._num_bytes = path.stat().st_size

    def read(self) -> bytes:
        """Give the contents. Raises AdapterRefused where they are not those of the registered version."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno()).st_size
                data = file.read(self._num_bytes) if found == self._num_bytes else b""
        except OSError as error:
            raise AdapterRefused(f"{self.path.name} cannot be read any more: {error}") from error
        if hashlib.sha256(data).hexdigest() == self._digest:
            return data
        how = f"it has {found} bytes, not {self._num_bytes}" if found != self._num_bytes else "its contents are others"
        raise AdapterRefused(f"{self.path.name} has changed on disk since the adapter was registered: {how}")


LINEARS = (nn.Linear, Conv1D, PackedLinear, LinearPart, QuantisedLinear)
Shape: TypeAlias = tuple[int, ...]

MAX_TOLD = 3
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What an adapter does to one weight: y += scaling * up @ (down @ x), then DoRA's magnitude.

    down, up, magnitude: names of the tensors, as PEFT converts them; magnitude only with DoRA
    """

    target: Target
    down: str
    up: str
    magnitude: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter version: facts in memory, weights in their file until it moves into a slot.

    changes: by the name of the module, or of its parameter
    is_older: its tensors have names of an older version of transformers
    notes:   what of its files changes nothing
    """

    version: str
    file: WeightsFile
    changes: Mapping[str, Change]
    is_older: bool = False
    notes: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        return max(change.target.rank for change in self.changes.values())


def bind_adapter(record: AdapterRecord, matcher: Matcher, *, is_divided: bool = False) -> Adapter:
    """Bind what the files hold to weights of the model, as PEFT does.

    is_divided: whether the model is a part of one

    Raises AdapterRefused: with the record's own reason, or where it does not fit the model. The values are judged
    where they are read.
    """
    if record.reason is not None or record.weights is None:
        raise AdapterRefused(record.reason or "it has no weights")
    matched = matcher.match(record.fields)
    left, is_older = _left(record, matched, matcher)
    changes, missing = _changes(matched, left)
    outside = [name for name, change in changes.items() if not matcher.is_inside(change.target.module)]
    inside = {name: change for name, change in changes.items() if name not in outside}
    _check_computed(inside, outside, is_divided=is_divided, sees=matcher.sees)
    if not inside:
        raise AdapterRefused(
            f"none of its {len(record.tensors)} tensors ({_told(record.tensors)}) is LoRA of a module that"
            " target_modules names in this model; serve it with the base that it was trained on, and save it with"
            " PEFT's save_pretrained"
        )
    try:
        file = WeightsFile(record.weights, record.weights_digest)
    except OSError as error:
        raise AdapterRefused(f"{record.weights.name}: {error}") from error
    notes = _notes(left, matcher, file)
    notes["left as in the base, as no tensors are there for them"] = missing
    notes["left out, as they are no part of what computes text"] = outside
    told = [*matched.notes, *(f"{how}: {_told(names)}" for how, names in notes.items() if names)]
    return Adapter(version=record.version, file=file, changes=inside, is_older=is_older, notes=tuple(told))


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Give the linears of the decoder and the output head, by name."""
    return {name: each for name, each in text_modules(model).items() if isinstance(each, LINEARS)}


def frame_of(module: nn.Module) -> Tensor:
    """What has the size, type and device of the module's weight [out, in], and need not have its numbers."""
    frame: Tensor | None = getattr(module, "frame", None)
    return weight_of(module) if frame is None else frame


def weight_of(module: nn.Module) -> Tensor:
    """The module's weight as [out, in]; transformers' Conv1D keeps it the other way round."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.T if isinstance(module, Conv1D) else weight


def _left(record: AdapterRecord, matched: Matched, matcher: Matcher) -> tuple[dict[str, Shape], bool]:
    """The shapes of all tensors, by the names that they have for this model, and whether these were older ones."""
    left = dict(record.tensors)
    for is_older in (False, True):
        if is_older or matcher.converts:
            empty = {name: torch.empty(shape, device="meta") for name, shape in record.tensors.items()}
            left = {
                name: tuple(each.shape) for name, each in converted(matcher.shapes, empty, is_older=is_older).items()
            }
        places = {_place(name) for name in left}
        if any(target.stored in places for target in matched.targets):
            break
    return left, is_older


def _changes(matched: Matched, left: dict[str, Shape]) -> tuple[dict[str, Change], list[str]]:
    """What tensors change, by the weight's name, and targets without any. Takes them out of what is left."""
    by_place: dict[str, dict[str, Shape]] = {}
    for name, shape in left.items():
        by_place.setdefault(_place(name), {})[name] = shape
    there = [target for target in matched.targets if target.stored in by_place]
    changes = {each.name: _change(each, by_place[each.stored], use_dora=matched.use_dora) for each in there}
    for change in changes.values():
        for name in {change.down, change.up, change.magnitude or change.up}:
            del left[name]
    return changes, [target.name for target in matched.targets if target.stored not in by_place]


def _place(name: str) -> str:
    return name.rpartition(".lora_")[0]


def _change(target: Target, found: Mapping[str, Shape], *, use_dora: bool) -> Change:
    """The change that the tensors of a target make. Raises AdapterRefused."""
    if target.refusal is not None:
        raise AdapterRefused(f"{target.name}: {target.refusal}")
    down, up = f"{target.stored}.lora_A.weight", f"{target.stored}.lora_B.weight"
    columns = target.rank * (target.experts or 1)
    wanted: dict[str, Shape] = {down: (columns, target.inputs), up: (target.outputs, columns)}
    magnitude = None
    if use_dora:
        old = f"{target.stored}.lora_magnitude_vector"
        magnitude = old if old in found else f"{old}.weight"
        wanted[magnitude] = (target.outputs,)
    for name, shape in wanted.items():
        if name not in found:
            raise AdapterRefused(f"tensor {name!r} is missing; save the adapter again with PEFT's save_pretrained")
        if found[name] != shape:
            raise AdapterRefused(
                f"tensor {name!r} has the shape {list(found[name])}; rank {target.rank} of adapter_config.json and"
                f" this model make it {list(shape)}. Serve the adapter with the base that it was trained on"
            )
    return Change(target=target, down=down, up=up, magnitude=magnitude)


def _check_computed(inside: Mapping[str, Change], outside: Collection[str], *, is_divided: bool, sees: bool) -> None:
    """Raises AdapterRefused for what fits the model, and is not computed in the way in which it is served."""
    if outside and sees:
        raise AdapterRefused(
            f"it changes {_told(outside)}, which is no part of the language model, and images are served without it;"
            f" set `images: false` to serve it for text, or {MERGE}"
        )
    divided = [name for name, change in inside.items() if change.magnitude or change.target.parameter]
    if is_divided and divided:
        raise AdapterRefused(
            f"{_told(divided)}: DoRA and LoRA of parameters are not computed where a model is divided; serve it without"
            f" tensor_parallel, or {MERGE}"
        )


def _notes(left: Iterable[str], matcher: Matcher, file: WeightsFile) -> dict[str, list[str]]:
    """Tensors that change nothing, by the reason. Raises AdapterRefused where one is another weight of the base."""
    named = {name: name.removeprefix(PREFIX).replace(".base_layer.", ".") for name in left}
    copies = {name: base for name, base in named.items() if base in matcher}
    tensors = load(file.read()) if copies else {}
    for name, base in copies.items():
        if not _is_copy(tensors[name], matcher.base_weight(base)):
            raise AdapterRefused(
                f"tensor {name!r} replaces a weight of the base by another; save the adapter without it"
                f" (save_pretrained with save_embedding_layers=False, no modules_to_save, bias='none'), or {MERGE}"
            )
    return {
        "left out, as target_modules does not name their modules": [name for name in left if name not in copies],
        "left out, as the base has the same weights": [*copies],
    }


def _is_copy(saved: Tensor, stored: Any) -> bool:
    """Whether a tensor is what a checkpoint's file has, a slice of which is given, in the tensor's own numbers."""
    if stored is None or tuple(stored.get_shape()) != tuple(saved.shape):
        return False
    begins = range(0, saved.shape[0], ROWS_AT_ONCE)
    parts = ((saved[each : each + ROWS_AT_ONCE], stored[each : each + ROWS_AT_ONCE]) for each in begins)
    return all(torch.equal(ours, theirs.to(ours.dtype)) for ours, theirs in parts)


def _told(names: Collection[str]) -> str:
    return ", ".join([*names][:MAX_TOLD]) + (f" and {len(names) - MAX_TOLD} more" if len(names) > MAX_TOLD else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The change to one weight: y += up @ (down @ x), where scaling and gain are inside `up` already.

    down: [rank, in];  up: [out, rank]; of experts [experts, rank, in] and [experts, out, rank]
    gain: [out], DoRA's m / |W + up @ down|, by which the base's output without bias is multiplied; None is 1
    """

    down: Tensor
    up: Tensor
    gain: Tensor | None = None

    @property
    def is_inert(self) -> bool:
        """Whether it leaves the module as it is, up to what the dtype cannot tell apart."""
        if bool(self.down.any()) and bool(self.up.any()):
            return False
        return self.gain is None or bool(((self.gain.float() - 1).abs() <= 4 * torch.finfo(self.gain.dtype).eps).all())

    @property
    def is_too_large(self) -> bool:
        """Whether inputs of size 1 would give outputs beyond the dtype, or squares of them beyond float32."""
        down, up = self.down.double(), self.up.double()
        squares = (up @ (down @ down.T) * up).sum(-1)
        return not (squares.sum().float().isfinite() and squares.sqrt().to(self.up.dtype).isfinite().all())


@torch.no_grad()
def read_weights(
    adapter: Adapter, model: nn.Module, linears: Mapping[str, nn.Module] | None, *, dtype: torch.dtype
) -> dict[str, LowRank]:
    """Read an adapter's file and give what it does to each weight, on the CPU.

    model:   or its shapes, as PEFT's conversion asks for
    linears: by name, with their weights; None where nothing is to be computed, and DoRA's gains are left out

    Raises AdapterRefused where the file has changed since it was registered, a value is not finite in the model's
    dtype, or nothing would change.
    """
    try:
        tensors = converted(model, load(adapter.file.read()), is_older=adapter.is_older)
    except SafetensorError as error:
        raise AdapterRefused(f"{adapter.file.path.name}: {error}") from error
    weights = {}
    for name, change in adapter.changes.items():
        linear = None if linears is None or change.magnitude is None else linears[name]
        weights[name] = _low_rank(name, change, tensors, linear, dtype=dtype)
    if all(low_rank.is_inert for low_rank in weights.values()):
        raise AdapterRefused(
            f"inert: lora_A or lora_B is zero in all of its {len(weights)} modules, so that it changes nothing"
            " (an adapter that was saved before it was trained looks like this; save it again after training)"
        )
    return weights


def _low_rank(
    name: str, change: Change, tensors: Mapping[str, Tensor], linear: nn.Module | None, *, dtype: torch.dtype
) -> LowRank:
    scaling, experts = change.target.scaling, change.target.experts
    down, up = tensors[change.down], tensors[change.up].float() * scaling
    gain = None
    if experts is not None:  # as PEFT lays them out
        down, up = down.unflatten(0, (experts, -1)), up.unflatten(1, (-1, experts)).permute(2, 0, 1)
    if linear is not None and change.magnitude is not None:
        merged = weight_of(linear).detach().float().cpu() + up @ down.float()
        exact = tensors[change.magnitude].float().flatten() / torch.linalg.vector_norm(merged, dim=1)
        gain, up = _finite(exact.to(dtype), f"module {name}: DoRA's gain"), up * exact[:, None]
    return LowRank(
        down=_finite(down.to(dtype), f"tensor {change.down}"),
        up=_finite(up.to(dtype), f"tensor {change.up}, scaled by {scaling:g},"),
        gain=gain,
    )


def check_values(tensors: Mapping[str, Tensor], scaling_of: Callable[[str], float], *, dtype: torch.dtype) -> None:
    """Judge an adapter's values without its model; `scaling_of` a module's name. Raises AdapterRefused."""
    for name, down in tensors.items():
        place, is_down, _ = name.partition(".lora_A.")
        if is_down:
            up, scaling = name.replace(".lora_A.", ".lora_B."), scaling_of(place.removeprefix(PREFIX))
            target = Target(module=place, parameter=None, stored=place, rank=len(down), scaling=scaling)
            if _low_rank(place, Change(target=target, down=name, up=up), tensors, None, dtype=dtype).is_too_large:
                raise AdapterRefused(too_large(dtype))


def too_large(dtype: torch.dtype) -> str:
    return f"its values are too large: with it, the model's outputs are not finite in {_name_of(dtype)}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _finite(tensor: Tensor, what: str) -> Tensor:
    if not tensor.abs().amax().isfinite():  # a fifth of the time that `isfinite` of all takes
        raise AdapterRefused(f"{what} holds values that are not finite in {_name_of(tensor.dtype)}")
    return tensor
