"""Traces: when requests came, how long they were and which beginnings they shared. Nothing of their texts.

Three kinds of files are read:

* JSON lines of Mooncake's traces (`timestamp` in ms, `input_length`, `output_length`, `hash_ids` of 512 tokens each;
  github.com/kvcache-ai/Mooncake), where `model`, `tenant`, `priority` and `block_tokens` may stand beside them;
* the router's log: its lines of completions, with what was measured;
* CSV of Azure's traces (`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`; github.com/Azure/AzurePublicDataset).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

from serve_app.core.names import ModelRef
from serve_app.core.prompt import Prompt
from serve_app.core.request import GenerationRequest, StopParams
from serve_app.core.shares import Priority, Share

BLOCK_TOKENS = 512
"""Of a hash in Mooncake's traces."""
MAX_TOKENS = 1 << 24
"""Of a prompt or a completion; more is a mistake in the file."""
DONE = 200
PRIORITIES: dict[str, Priority] = {"interactive": "interactive", "standard": "standard", "batch": "batch"}


class Unusable(Exception):
    """A file or a case cannot be simulated; the message is for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request of a trace.

    at_s:    since the first one
    model:   as the client wrote it; "" is the one that is simulated
    pieces:  of the prompt, in its order: what each begins with, and its tokens; equal pieces are equal tokens
    first_s, total_s: as they were measured, from the arrival to the first token and to the end; None is unknown
    """

    at_s: float
    output_tokens: int
    pieces: tuple[tuple[str, int], ...]
    model: str = ""
    tenant: str = "local"
    priority: Priority = "standard"
    first_s: float | None = None
    total_s: float | None = None

    @property
    def input_tokens(self) -> int:
        return sum(size for _, size in self.pieces)

    @property
    def base(self) -> str:
        return self.model.partition(":")[0]

    @property
    def adapter(self) -> str:
        return self.model.partition(":")[2]

    def request(self, base: str, number: int) -> GenerationRequest:
        """Return the request that a router would make of it, with tokens that say nothing."""
        adapter = self.adapter
        model = ModelRef(base=base, adapter=adapter, version=adapter) if adapter else ModelRef(base=base)
        ids = tuple(chain.from_iterable(range(_place(name), _place(name) + size) for name, size in self.pieces))
        return GenerationRequest(
            request_id=str(number),
            model=model,
            prompt=Prompt(parts=(ids,)),
            stop=StopParams(max_tokens=self.output_tokens, ignore_eos=True),
            share=Share(flow=self.tenant, priority=self.priority),
            cache_salt=self.tenant,
        )


def read_trace(file: str) -> list[Asked]:
    """Return the requests of a trace in the order in which they came. Raises Unusable."""
    try:
        with Path(file).open(encoding="utf-8", newline="") as lines:
            found = list(_of_csv(lines) if file.endswith(".csv") else _of_json_lines(lines))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Unusable(f"{file} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise Unusable(f"{file} is no trace: {error}") from error
    if not found:
        raise Unusable(f"{file} has no request in it")
    begin = min(each.at_s for each in found)
    return sorted((replace(each, at_s=each.at_s - begin) for each in found), key=lambda each: each.at_s)


def _of_json_lines(lines: Iterable[str]) -> Iterator[Asked]:
    for number, line in enumerate(lines, 1):
        at = line.find("{")  # Ray writes the name of a process before a line of its log
        if at < 0:
            continue
        try:
            record = json.loads(line[at:])
        except ValueError as error:
            if at == 0:
                raise ValueError(f"line {number}: {error}") from error
            continue  # what else a process has to say
        try:
            if "input_length" in record:
                yield _of_mooncake(record, number)
            elif record.get("event") == "completion" and record.get("status") == DONE and record.get("prompt_tokens"):
                yield _of_log(record, number)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"line {number}: {error}") from error


def _of_mooncake(record: Mapping[str, Any], number: int) -> Asked:
    left, size = _tokens(record["input_length"]), _tokens(record.get("block_tokens", BLOCK_TOKENS))
    pieces: list[tuple[str, int]] = []
    for name in record.get("hash_ids", ()):
        pieces.append((f"hash {name}", min(size, left)))
        left -= pieces[-1][1]
    if left:
        pieces.append((f"own {number}", left))
    return Asked(
        at_s=(_seconds(record["timestamp"]) or 0.0) / 1000,
        output_tokens=_tokens(record["output_length"]),
        pieces=tuple(piece for piece in pieces if piece[1]),
        model=str(record.get("model", "")),
        tenant=str(record.get("tenant", "local")),
        priority=PRIORITIES[record.get("priority", "standard")],
        first_s=_seconds(record.get("first_s")),
        total_s=_seconds(record.get("total_s")),
    )


def _of_log(record: Mapping[str, Any], number: int) -> Asked:
    """Take what was found cached for a beginning that all requests of the tenant to the model share."""
    cached, tenant, model = _tokens(record["cached_tokens"]), str(record.get("tenant", "local")), str(record["model"])
    own = _tokens(record["prompt_tokens"]) - cached
    pieces = ((f"of {tenant} to {model}", cached), (f"own {number}", own))
    return Asked(
        at_s=datetime.fromisoformat(record["time"]).timestamp() - float(record["duration_s"]),
        output_tokens=_tokens(record["completion_tokens"]),
        pieces=tuple(piece for piece in pieces if piece[1]),
        model=model,
        tenant=tenant,
        first_s=_seconds(record.get("first_sent_s")),
        total_s=float(record["duration_s"]),
    )


def _of_csv(lines: Iterable[str]) -> Iterator[Asked]:
    for number, row in enumerate(csv.DictReader(lines), 2):
        yield Asked(
            at_s=datetime.fromisoformat(row["TIMESTAMP"]).timestamp(),
            output_tokens=_tokens(row["GeneratedTokens"]),
            pieces=((f"own {number}", _tokens(row["ContextTokens"])),),
        )


def _tokens(value: Any) -> int:
    number = int(value)
    if not 0 <= number <= MAX_TOKENS:
        raise ValueError(f"a number of tokens must be from 0 to {MAX_TOKENS}; found {number}")
    return number


def _seconds(value: Any) -> float | None:
    number = None if value is None else float(value)
    if number is not None and not math.isfinite(number):
        raise ValueError(f"a time must be a finite number; found {number}")
    return number


def _place(name: str) -> int:
    """Return the first token id of a piece."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()) >> 35  # below 2 ** 29
