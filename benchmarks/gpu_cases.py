"""What is measured of the engine on a GPU, and the least that one could take for it; told apart from any GPU."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

from benchmarks.engine_cases import Case, Shape, decode, work

SHAPES = ("random-0.5b", "random-1.5b", "random-8b")
ROWS = (1, 8, 32, 128, 256)
ADAPTERS = (0, 8, 64)
RANK = 16
CONTEXT, PROMPT = 512, 2048
WANTED_FLOOR, WANTED_SLOW_DOWN = 1.4, 1.1
"""What is aimed at: of a step by its floor, and of one with many adapters by one without."""


def cases(*, rows: Items[int] = ROWS, adapters: Items[int] = ADAPTERS, context: int = CONTEXT) -> list[Case]:
    """Every number of rows, with as many adapters as there are rows for, all of which are resident; then prompts."""
    most = max(adapters)
    decoding = [
        decode(count, context, adapters=each, resident=most if each else 0)
        for count in rows
        for each in adapters
        if each <= count
    ]
    return [*decoding, *(Case(kind="prefill", rows=count, context=PROMPT) for count in (1, 4))]


def adapter_bytes(config: Mapping[str, Any], *, rank: int, itemsize: int) -> int:
    """Of one adapter's factors on every linear module of a decoder like Llama's."""
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    sizes = 2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + inner)
    return layers * sizes * rank * itemsize


def floor_ms(case: Case, shape: Shape, *, bytes_per_s: float, flop_per_s: float, of_adapter: int) -> float:
    """At least so long: for what must be read, or for what must be computed, whichever is longer."""
    read, operations = work(case, shape)
    return 1e3 * max((read + case.adapters * of_adapter) / bytes_per_s, operations / flop_per_s)


def told(
    case: Case, wall_ms: float, floor: float, *, alone_ms: float | None, generate_ms: float | None
) -> dict[str, Any]:
    """One row of the report.

    alone_ms: of the same rows without adapters;  generate_ms: of transformers' `generate`; None where it was not asked
    """
    row: dict[str, Any] = {
        "case": case.name,
        "wall_ms": wall_ms,
        "floor_ms": floor,
        "wall/floor": wall_ms / floor,
        "tokens_per_s": case.rows * case.num_computed * 1e3 / wall_ms,
    }
    if alone_ms is not None:
        row["with/without adapters"] = wall_ms / alone_ms
    if generate_ms is not None:
        row |= {"generate_ms": generate_ms, "generate/wall": generate_ms / wall_ms}
    return row


def misses(rows: Items[Mapping[str, Any]]) -> list[str]:
    """Cases that are not as fast as is aimed at, and how fast they are."""
    found = []
    for row in rows:
        if row["case"].startswith("decode") and row["wall/floor"] > WANTED_FLOOR:
            found.append(f"{row['case']}: {row['wall/floor']:.2f} of the floor, {WANTED_FLOOR} is aimed at")
        if row.get("with/without adapters", 0.0) > WANTED_SLOW_DOWN:
            found.append(f"{row['case']}: {row['with/without adapters']:.2f} of a step without adapters")
    return found
