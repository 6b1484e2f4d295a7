"""What of the engine alone is measured: companies of rows, and the least that the machine could take for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

RANKS = (8, 16, 32, 64)
"""Of adapters, one after the other."""
MANY = 64
"""Adapters resident in the cases with many; more are not made."""
NEW_TOKENS = 32
"""Of each prompt in the cases of prefix hits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Rows that decode one token each per step, or prompts that are computed.

    context:  tokens before the one that is computed; of prompts, their length
    adapters: in the batch, row by row in turn; none is the base
    resident: adapters in the bank, of those in the batch at least
    sampling: a key of `benchmarks/engine_worker.py`'s table
    """

    kind: Literal["decode", "prefill", "hit"]
    rows: int
    context: int
    adapters: int = 0
    resident: int = 0
    sampling: str = "greedy"
    is_constrained: bool = False

    @property
    def name(self) -> str:
        parts = [f"{self.kind} {self.rows} x {self.context}"]
        if self.adapters or self.resident:
            parts.append(f"{self.adapters} of {max(self.adapters, self.resident)} adapters")
        if self.sampling != "greedy":
            parts.append(self.sampling)
        if self.is_constrained:
            parts.append("constrained")
        return ", ".join(parts)

    @property
    def num_computed(self) -> int:
        """Tokens of each row, in a step or of a prompt."""
        return {"decode": 1, "prefill": self.context, "hit": NEW_TOKENS}[self.kind]

    def told(self) -> dict[str, Any]:
        return asdict(self)


def decode(rows: int, context: int = 256, **more: Any) -> Case:
    return Case(kind="decode", rows=rows, context=context, **more)


QUICK = (
    decode(1),
    decode(8),
    decode(32),
    decode(8, adapters=8),
    decode(8, sampling="mixed"),
    decode(8, is_constrained=True),
    Case(kind="prefill", rows=1, context=512),
    Case(kind="hit", rows=8, context=512),
)
WHOLE = (
    *(decode(rows, context) for rows in (1, 8, 32, 64) for context in (256, 1024, 8192) if rows * context <= 1 << 16),
    *(decode(16, adapters=count, resident=MANY) for count in (0, 1, 2, 4, 8, 16)),
    decode(MANY, adapters=MANY),
    *(decode(32, sampling=name) for name in ("plain", "nucleus", "truncated", "penalties", "mixed")),
    *(decode(rows, is_constrained=True) for rows in (1, 32)),
    *(Case(kind="prefill", rows=rows, context=context) for rows, context in ((1, 256), (8, 256), (1, 1024), (1, 4096))),
    Case(kind="prefill", rows=8, context=256, adapters=8),
    Case(kind="hit", rows=1, context=1024),
    Case(kind="hit", rows=16, context=1024),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a decoder, what a floor is counted from.

    linear: weights of the layers' linear modules;  head: of the output head
    itemsize: bytes of a weight, and of a key's or value's number
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    linear: int
    head: int
    itemsize: int

    @classmethod
    def of(cls, config: Mapping[str, Any], itemsize: int) -> Shape:
        """Of a decoder like Llama's, from its config.json."""
        hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        return cls(
            layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, itemsize=itemsize,
            linear=layers * (attention + 3 * hidden * inner), head=hidden * config["vocab_size"],
        )  # fmt: skip

    @property
    def bytes_per_position(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize


def work(case: Case, shape: Shape) -> tuple[float, float]:
    """Bytes that a step has to read at least, and its floating point operations; all steps of prompts together.

    Left out: what adapters add, activations, and reading keys more than once.
    """
    if case.kind == "decode":
        tokens, scored, keys = case.rows, case.rows, case.rows * case.context
    else:
        new = case.num_computed
        before = case.context if case.kind == "hit" else 0
        tokens, scored, keys = case.rows * new, case.rows, case.rows * (before + new)
    attended = keys if case.kind == "decode" else case.rows * _attended(case)
    read = (shape.linear + shape.head) * shape.itemsize + keys * shape.bytes_per_position
    products = 2 * tokens * shape.linear + 2 * scored * shape.head
    return read, products + 4 * shape.layers * shape.heads * shape.head_dim * attended


def _attended(case: Case) -> float:
    """Pairs of a query and a key of one prompt."""
    if case.kind == "hit":
        return NEW_TOKENS * (case.context + NEW_TOKENS / 2)
    return case.context * (case.context + 1) / 2


def floor_ms(case: Case, shape: Shape, *, bytes_per_s: float, flop_per_s: float) -> float:
    """What memory or arithmetic alone would take, whichever is more."""
    read, operations = work(case, shape)
    return max(read / bytes_per_s, operations / flop_per_s) * 1e3
