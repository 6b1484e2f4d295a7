"""Batches as routers and Accounts speak of them: files of requests, computed in slots that nobody waits for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from serve_app.core.errors import InvalidRequest
from serve_app.core.ledger import Row

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses")
"""Routes whose requests a batch may hold."""
LEAST_SECONDS, MOST_SECONDS = 3600, 30 * 86_400
"""Until a file expires, if its owner says when."""
DEFAULT_FOLDER = "files"
CREATE_BATCH, IDEMPOTENCY_KEY = "create_batch", "idempotency_key"
"""The service that begins a batch, and its argument: the `Idempotency-Key` of the request, or None."""
FILES_DAYS = 30
"""After which a file expires whose owner says nothing, as OpenAI's do, and an ended batch is forgotten."""
MAX_LINES = 50_000
LOST_S = 10.0
"""A router that Accounts have not heard for so long has lost its lines; others get them."""

OK, FAULT = 200, 500
AGAIN = frozenset({429, 503})
"""Statuses that say nothing of a line: it is computed later."""
REST_S = 2.0
"""For so long rests what is refused without a time."""

Key = tuple[str, int]
"""A batch's id and the number of a line, from 1; 0 is the batch itself, which one router checks and one writes."""


class BatchState(StrEnum):
    """The `status` of a batch, as OpenAI names it."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OPEN_STATES = (BatchState.VALIDATING, BatchState.IN_PROGRESS, BatchState.FINALIZING, BatchState.CANCELLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCard:
    """What a router is told of an open batch.

    outcome:   the state in which it will end
    num_left:  lines without a result
    is_yours:  whether this router is to check the input (`validating`), or to write the files (any other state)
    """

    id: str
    tenant: str
    key_id: str
    state: BatchState
    outcome: BatchState
    endpoint: str
    model: str
    input_file: str
    num_left: int
    is_yours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One request of a batch, as the place of its text in the input file."""

    batch: str
    number: int
    offset: int
    length: int

    @property
    def key(self) -> Key:
        return self.batch, self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What the service answered to a line. body: JSON;  retry_s: seconds of its Retry-After"""

    status: int
    body: bytes
    retry_s: float = REST_S

    def line(self, own_id: str, custom_id: str) -> dict[str, Any]:
        """Return the line of an output file, as OpenAI has it."""
        response = {"status_code": self.status, "request_id": own_id, "body": json.loads(self.body)}
        return {"id": own_id, "custom_id": custom_id, "response": response, "error": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The line of the output file, or of the error file where the status is not 200, with its ledger rows."""

    batch: str
    number: int
    status: int
    text: str
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A line as the store has it when the files are written: with its result, or without one."""

    line: Line
    status: int | None
    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What Accounts answer a router that asks for work: all open batches, and the lines that it leased."""

    batches: tuple[BatchCard, ...] = ()
    lines: tuple[Line, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A file that a router has written into the folder of files.

    seconds: after which it expires; None is what the service has for all
    """

    id: str
    name: str
    purpose: str
    num_bytes: int
    seconds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputError:
    """Why an input file was refused. line: from 1; None where it is about the whole file"""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """An input file that was read: its model and the places of its requests, or what is wrong with it."""

    model: str = ""
    spans: Sequence[tuple[int, int]] = ()
    errors: Sequence[InputError] = field(default_factory=tuple)


def seconds_of(name: str, sent: object) -> int | None:
    """Return after how many seconds a file expires, as OpenAI's parameter of that name says. Raises InvalidRequest."""
    if sent is None:
        return None
    seconds = sent.get("seconds") if isinstance(sent, Mapping) and sent.get("anchor") == "created_at" else None
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        must = f'be {{"anchor": "created_at", "seconds": N}}, N from {LEAST_SECONDS} to {MOST_SECONDS}'
        raise InvalidRequest.refusing(name, must=must, found=str(sent)[:96])
    return seconds
