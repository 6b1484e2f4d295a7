"""Files of requests and of answers: OpenAI's lines, or rows with a column `prompt`, in JSON lines or Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from serve_app.api.error_text import shown
from serve_app.api.parameters import PARAMETERS
from serve_app.core.batches import ENDPOINTS, OK
from serve_app.core.errors import InvalidRequest
from serve_app.core.machine import NEEDS_PYARROW

PARQUET, ROWS = ".parquet", 1024
"""How the name of such a file ends, and how many of its rows are in memory."""
ID, PROMPT, EMBEDDINGS = "custom_id", "prompt", "/v1/embeddings"
COLUMNS = {"status": "int64", "text": "string", "finish_reason": "string", "error": "string", "response": "string"}
"""Of an answer, with their types in Arrow's names. `response` is the whole body, in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request. number: of its line or row, from 1;  row: what it was read from"""

    number: int
    custom_id: str
    path: str
    body: Mapping[str, object]
    row: Mapping[str, object]

    @property
    def unsent(self) -> list[str]:
        """Return the columns that are no part of the request."""
        return [] if "body" in self.row else sorted(self.row.keys() - PARAMETERS.keys() - {ID})


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a line or a row becomes a request.

    model:      that answers all of them; None is the one that each names, or else `default`
    parameters: of requests that do not say otherwise, and are no embeddings
    """

    default: str
    model: str | None = None
    parameters: Mapping[str, object] = field(default_factory=dict)

    def question(self, number: int, entry: object) -> Question:
        """Raises InvalidRequest, which names the line."""
        line = f"line {number}"
        if not isinstance(entry, dict) or not entry.keys() & {"body", PROMPT}:
            must = "be an object with a prompt, or with url and body as a line of OpenAI's batches"
            raise InvalidRequest.refusing(line, must=must, found=shown(entry))
        path = entry.get("url") if "body" in entry else ENDPOINTS[0]
        if path not in ENDPOINTS:
            raise InvalidRequest.refusing(f"{line}: url", must=f"be one of {', '.join(ENDPOINTS)}", found=shown(path))
        row = {name: value for name, value in entry.items() if name in PARAMETERS and value is not None}
        body = entry.get("body", row)
        if not isinstance(body, dict) or body.get("stream"):
            raise InvalidRequest.refusing(f"{line}: body", must="be an object without stream", found=shown(body))
        own = self.parameters if path != EMBEDDINGS else {}
        body = {"model": self.default, **own, **body, **({"model": self.model} if self.model else {})}
        try:
            json.dumps(body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidRequest.refusing(f"{line}: body", must="have values that JSON has", found=str(error)) from None
        custom_id = str(number if entry.get(ID) in (None, "") else entry[ID])
        return Question(number=number, custom_id=custom_id, path=path, body=body, row=entry)


def questions(file: Path, form: Form) -> Iterator[Question]:
    """Yield the requests of a file in its order. Raises InvalidRequest, OSError."""
    entries = _rows(file) if file.suffix == PARQUET else _lines(file)
    return (form.question(number, entry) for number, entry in entries)


def schema_of(file: Path) -> Any:
    """Return the columns of a result in Parquet: those of its input, then those of answers. Raises InvalidRequest."""
    arrow = _arrow()
    own = _parquet(file).schema_arrow if file.suffix == PARQUET else arrow.schema([(ID, arrow.string())])
    if clashing := COLUMNS.keys() & set(own.names):
        raise InvalidRequest(f"{file} has columns that are the result's own: rename {', '.join(sorted(clashing))}.")
    return arrow.schema([*own, *((name, arrow.type_for_alias(kind)) for name, kind in COLUMNS.items())])


def columns_of(line: Mapping[str, Any]) -> dict[str, object]:
    """Return an answer as columns. line: of OpenAI's output files"""
    status, body = line["response"]["status_code"], line["response"]["body"]
    choice: Mapping[str, Any] = next(iter(body.get("choices") or ()), {})
    return {
        "status": status,
        "text": choice.get("text", (choice.get("message") or {}).get("content")),
        "finish_reason": choice.get("finish_reason"),
        "error": None if status == OK else body.get("error", body)["message"],
        "response": json.dumps(body),
    }


def write_answers(answered: Iterable[tuple[Question, dict[str, Any]]], output: Path, schema: Any = None) -> None:
    """Write the lines of all answers, in this order. schema: as `schema_of` returns it, for Parquet"""
    new = output.with_name(f"{output.name}.new")
    if schema is None:
        with new.open("w", encoding="utf-8") as target:
            target.writelines(json.dumps(line) + "\n" for _, line in answered)
    else:
        rows = ({ID: question.custom_id, **question.row, **columns_of(line)} for question, line in answered)
        with _arrow().parquet.ParquetWriter(new, schema) as writer:
            while some := list(islice(rows, ROWS)):
                writer.write_table(_arrow().Table.from_pylist(some, schema=schema))
    new.replace(output)


def _lines(file: Path) -> Iterator[tuple[int, object]]:
    with file.open("rb") as source:
        for number, text in enumerate(source, start=1):
            try:
                entry = json.loads(text) if text.strip() else None
            except ValueError as error:
                raise InvalidRequest(f"line {number} of {file} is no JSON: {error}.") from None
            if isinstance(entry, dict) and ID in entry:  # a column of texts, where the result is Parquet
                own = entry.pop(ID)
                entry |= {} if own in (None, "") else {ID: str(own)}
            if text.strip():
                yield number, entry


def _rows(file: Path) -> Iterator[tuple[int, object]]:
    batches = _parquet(file).iter_batches(ROWS)
    return enumerate((row for batch in batches for row in batch.to_pylist()), start=1)


def _parquet(file: Path) -> Any:
    arrow = _arrow()
    try:
        return arrow.parquet.ParquetFile(file)
    except arrow.ArrowException as error:
        raise InvalidRequest(f"{file} cannot be read as Parquet: {error}.") from None


def _arrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise InvalidRequest(f"{NEEDS_PYARROW}.") from None
    return pyarrow
