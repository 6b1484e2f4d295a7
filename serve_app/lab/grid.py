"""Grids of prompts, models and parameters: a completion for each combination, kept in a file as it arrives."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.util
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pandas

from serve_app.lab.completion import Completions, storable
from serve_app.lab.errors import ServiceError

Row = dict[str, Any]
Params = Mapping[str, Any]
Price = Mapping[str, Any]
"""Per million tokens, as the service explains it: `prompt`, `completion`, and `cached` or None where it is no other."""
RESULTS = (
    "text", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens", "cost", "seconds", "logprob",
    "error",
)  # fmt: skip
NOT_PARAMETERS = frozenset({"id", "prompt", "model", "messages", "n", "best_of", "stream", "stream_options", *RESULTS})
OF_ONE_CELL = frozenset({400, 413, 422, 500, 504})
"""Status codes that say something of one request alone; any other failure would meet the next requests, too."""
PARQUET, BESIDE = ".parquet", ".jsonl"
START = b'{"id": "'
"""Of a grid's file of JSON lines."""
TOKENS_PER_PRICE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One completion of a grid.

    id:     derived from all that is sent, so that a cell has the same one in every run
    params: as they are sent, with a seed
    """

    id: str
    prompt: str
    model: str
    params: Params

    @property
    def row(self) -> Row:
        return {"id": self.id, "prompt": self.prompt, "model": self.model, **self.params}


class Kept:
    """The rows of a grid by their ids, and the file that keeps them for the next time.

    path: of JSON lines; if it ends in `.parquet`, the lines are beside it, and `finish` writes Parquet from all of them
    Raises ValueError where a file has other content, ModuleNotFoundError where Parquet cannot be written.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.rows: dict[str, Row] = {}
        self._parquet: Path | None = None
        self._file: BinaryIO | None = None
        if path is None:
            return
        lines = Path(path)
        if lines.suffix == PARQUET:
            _check_parquet(lines)
            self._parquet, lines = lines, lines.with_name(lines.name + BESIDE)
        self._file = lines.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.rows = _rows_of(lines)
        except BlockingIOError:
            self.close()
            raise ValueError(f'"path" must be no file that another grid writes now; found {lines}.') from None
        except BaseException:
            self.close()
            raise

    def add(self, row: Row) -> None:
        """Take a row. One without an error is in the file from then on, even if this process is killed."""
        self.rows[row["id"]] = row
        if self._file is not None and row["error"] is None:
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()

    def finish(self, frame: pandas.DataFrame) -> None:
        """Write the whole frame, if it is wanted as Parquet."""
        if self._parquet is not None:
            frame.to_parquet(self._parquet)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def cells_of(prompts: Iterable[str], models: Iterable[str], params: Iterable[Params]) -> list[Cell]:
    """Return every prompt by every model with every set of parameters, each once. Raises ValueError.

    If a set has no seed, its seed is derived from the prompt and the set: all models draw with the same one.
    """
    prompts, models = list(dict.fromkeys(prompts)), list(dict.fromkeys(models))
    cells: dict[str, Cell] = {}
    for at, each in enumerate(params):
        if found := sorted(NOT_PARAMETERS & each.keys()):
            raise ValueError(
                f'"params[{at}]" must have no {found[0]!r}, as a cell is one completion of one prompt by one model. '
                'For several draws give several seeds: params=[{"seed": 1}, {"seed": 2}].'
            )
        for model in models:
            for prompt in prompts:
                sent = {"seed": int(_digest(prompt, each)[:12], 16), **each}
                cell = Cell(id=_digest(prompt, model, sent)[:16], prompt=prompt, model=model, params=sent)
                cells[cell.id] = cell
    return list(cells.values())


def row_of(cell: Cell, answer: Completions, price: Price) -> Row:
    """Return what came of a cell, and what that cost."""
    (one,) = answer
    cached = answer.usage["cached_tokens"]
    of_cached = price["prompt"] if price["cached"] is None else price["cached"]
    cost = (answer.usage["prompt_tokens"] - cached) * price["prompt"] + cached * of_cached
    cost += answer.usage["completion_tokens"] * price["completion"]
    return {
        **cell.row,
        "text": one.text,
        "finish_reason": one.finish_reason,
        **answer.usage,
        "cost": cost / TOKENS_PER_PRICE,
        "seconds": answer.seconds,
        "logprob": one.logprob,
        "error": None,
    }


def failed_row(cell: Cell, error: ServiceError) -> Row:
    """Return the row of a cell that the service refused; raise what would meet other cells, too."""
    if error.status not in OF_ONE_CELL:
        raise error
    return {**cell.row, "error": error.message}


def frame_of(cells: Sequence[Cell], rows: Mapping[str, Row]) -> pandas.DataFrame:
    """Return a row per cell, in their order, with a column for each parameter of any of them."""
    names = dict.fromkeys(name for cell in cells for name in cell.params)
    found = [rows[cell.id] for cell in cells]
    columns = {name: [row.get(name) for row in found] for name in ("prompt", "model", *names, *RESULTS)}
    columns |= {name: storable(columns[name]) for name in names}
    return pandas.DataFrame(columns, index=pandas.Index([cell.id for cell in cells], name="id"))


def summary_of(frame: pandas.DataFrame, *, num_kept: int) -> str:
    """Say what a grid came to, on one line."""
    tokens = int(frame["prompt_tokens"].sum() + frame["completion_tokens"].sum())
    said = [f"{len(frame)} completions", f"{num_kept} of them from the file", f"{tokens} tokens"]
    said += [f"cost {frame['cost'].sum():.6g}", f"{frame['error'].notna().sum()} failed"]
    return " · ".join(said)


def most_of(parts: Sequence[Mapping[str, Any]]) -> Row:
    """Sum up what the service explained of several prompts."""
    return {
        "completions": len(parts),
        "refused": sum(part["refused_because"] is not None for part in parts),
        "prompt_tokens": sum(part["kept_prompt_tokens"] for part in parts),
        "completion_tokens_at_most": sum(part["max_completion_tokens"] or 0 for part in parts),
        "cost_at_most": sum(part["cost_at_most"] for part in parts),
    }


def parameters_of(frame: pandas.DataFrame) -> list[str]:
    """Return the names of the columns that have the parameters of a grid."""
    names = list(frame.columns)
    return names[names.index("model") + 1 : names.index("text")]


Item = TypeVar("Item")
Result = TypeVar("Result")


async def side_by_side(
    items: Iterable[Item], work: Callable[[Item], Awaitable[Result]], at_once: int
) -> AsyncIterator[Result]:
    """Yield results as they are there, of so many items at once; closing it cancels the rest. Raises ValueError."""
    if at_once < 1:
        raise ValueError(f'"at_once" must be 1 or more; found {at_once}.')
    waiting, running = iter(items), set[asyncio.Future[Result]]()
    try:
        while running := running | {
            asyncio.ensure_future(work(each)) for each in islice(waiting, at_once - len(running))
        }:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for each in sorted(done, key=lambda each: each.exception() is not None):
                yield each.result()
    finally:
        for each in running:
            each.cancel()


def _rows_of(lines: Path) -> dict[str, Row]:
    """Read rows, and cut off a last line that a killed process left unfinished. Another file is left as it is."""
    content = lines.read_bytes() if lines.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    try:
        if content[: len(START)] != START[: len(content)]:
            raise ValueError("its beginning")
        rows = {row["id"]: row for row in map(json.loads, whole.splitlines())}
    except (ValueError, LookupError, TypeError) as error:
        must = "must name the file of a grid, or one that does not exist yet"
        raise ValueError(f'"path" {must}; found {lines}, which has other content: {error}.') from None
    if len(whole) < len(content):
        os.truncate(lines, len(whole))
    return rows


def _check_parquet(path: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        remedy = "pip install -e '.[parquet]', or name a file that ends in .jsonl"
        raise ModuleNotFoundError(f'"path" {path} needs pyarrow: {remedy}', name="pyarrow")


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
