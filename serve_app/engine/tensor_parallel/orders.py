"""What the first shard tells the others, in the order in which they carry it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from safetensors.torch import load, save

from serve_app.core.adapters import AdapterRecord
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.step import Layout
from serve_app.engine.lora.adapter import LowRank

Call: TypeAlias = Literal["bring", "copy", "claim", "keep", "vacate", "discard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The first order: which shard this one is, and where sums are found; see `Sums`."""

    number: int
    count: int
    meeting_place: str
    device: str
    threads: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load this shard of a model, in the place of one that there was."""

    config: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """Bind and probe these adapters."""

    records: tuple[AdapterRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Make ready for steps. versions: of the adapters that the first shard has bound"""

    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bring:
    """Compute rows of this slot with an adapter. weights: the shard's part, as `packed` makes them"""

    slot: int
    version: str
    weights: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """What the ledger had a storage do."""

    call: Call
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Carry these deeds out, then compute a step. by_modules: by those that transformers wrote"""

    deeds: tuple[Deed, ...]
    layout: Layout
    by_modules: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Of a shard that others wait for. refusal: why the model is not loaded; None where all is well"""

    refusal: str | None = None


Order: TypeAlias = Join | Load | Bind | Serve | Bring | Compute


def packed(weights: Mapping[str, LowRank]) -> bytes:
    """What an adapter does to modules, in one piece. Gains are not among it."""
    tensors = {f"down {name}": each.down.contiguous() for name, each in weights.items()}
    return save(tensors | {f"up {name}": each.up.contiguous() for name, each in weights.items()})


def unpacked(data: bytes) -> dict[str, LowRank]:
    """Undo `packed`."""
    tensors = load(data)
    names = [name.removeprefix("up ") for name in tensors if name.startswith("up ")]
    return {name: LowRank(down=tensors[f"down {name}"], up=tensors[f"up {name}"]) for name in names}
