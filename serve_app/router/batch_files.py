"""The folder of files: what tenants sent and what batches wrote, each under its id. All routers share the folder."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from serve_app.api.parse import check_depth
from serve_app.core.batches import MAX_LINES, BatchCard, Checked, InputError, Kept, NewFile
from serve_app.core.errors import InvalidRequest, Unavailable

logger = logging.getLogger(__name__)

MAX_ERRORS = 100
"""Of one input file that are told."""
RETRY_S = 30
"""For whom the folder fails."""
MAX_ID_CHARS, MAX_MODEL_CHARS = 512, 512
MAX_LINE_BYTES = 32 << 20
"""Of an input file, so that none fills a router's memory as it is read; routes take less (`max_body_bytes`)."""
MAX_DEPTH = 100
"""Of a request, which is written anew; routes take less."""
STRAY_S = 600.0
"""For so long a file may be nobody's before it is removed: one that is being written has no row yet."""
REASONS = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed, as its batch was cancelled.",
}


Ask = Callable[..., Awaitable[object]]
"""Calls a method of Accounts that is about batches, with its arguments. Raises the ServeError that it answers."""


class BatchFiles:
    """Every method but `sweep` blocks, and is for a worker thread. All raise Unavailable where the folder fails.

    clock: seconds, monotonic: no clock of a file system decides what is removed
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._nobodys: dict[str, float] = {}  # since when

    def path(self, file_id: str) -> Path:
        return self._folder / file_id

    def write(self, source: BinaryIO) -> tuple[str, int]:
        """Write a new file; return its id and its size in bytes."""
        with self._new_files(1) as ((file_id, target),):
            shutil.copyfileobj(source, target, 1 << 20)
            return file_id, target.tell()

    def remove(self, file_id: str) -> None:
        with self._usable():
            self.path(file_id).unlink(missing_ok=True)

    def has(self, file_id: str) -> bool:
        with self._usable():
            return self.path(file_id).is_file()

    def read(self, file_id: str, offset: int, length: int) -> dict[str, object]:
        """Return a request that was checked."""
        with self.path(file_id).open("rb") as source:
            source.seek(offset)
            found: dict[str, object] = json.loads(source.read(length))
            return found

    def check(self, batch: BatchCard) -> Checked:
        """Read a batch's input."""
        checking = _Checking(batch.endpoint)
        try:
            with self.path(batch.input_file).open("rb") as source:
                offset = 0
                for number, text in enumerate(iter(lambda: source.readline(MAX_LINE_BYTES + 1), b""), start=1):
                    if len(text) > MAX_LINE_BYTES:
                        checking.refuse(number, "line_too_long", f"A line may have {MAX_LINE_BYTES} bytes.")
                        break
                    if text.strip():
                        checking.add(number, offset, text)
                    offset += len(text)
                    if len(checking.errors) >= MAX_ERRORS or len(checking.spans) > MAX_LINES:
                        break
        except FileNotFoundError:
            checking.refuse(None, "invalid_file", "The input file is gone.", "input_file_id")
        return checking.result()

    def finish(self, batch: BatchCard, pages: Iterator[list[Kept]]) -> tuple[int, dict[str, NewFile]]:
        """Write the files of a batch that ends; return how many results are in them, and the files, by their names in
        the batch.
        """
        num_kept, found, empty = 0, dict[str, NewFile](), list[str]()
        with self._new_files(2) as (output, error):
            for kept in (each for page in pages for each in page):
                num_kept += kept.status is not None
                text = self._without_result(batch, kept) if kept.text is None else kept.text
                _, target = output if kept.status == 200 else error
                target.write(text.encode() + b"\n")
            for name, (file_id, target) in (("output", output), ("error", error)):
                if size := target.tell():
                    file_name = f"{batch.id}_{name}.jsonl"
                    new = NewFile(id=file_id, name=file_name, purpose="batch_output", num_bytes=size)
                    found[f"{name}_file_id"] = new
                else:
                    empty.append(file_id)
        for file_id in empty:
            self.remove(file_id)
        return num_kept, found

    async def sweep(self, ask: Ask) -> None:
        """Remove what is nobody's: of removed tenants, of routers that died while they wrote, expired files."""
        names = await asyncio.to_thread(lambda: [each.name for each in self._folder.glob("file-*")])
        nobodys = await ask("strays", names) if names else []
        assert isinstance(nobodys, list)
        now = self._clock()
        self._nobodys = {name: self._nobodys.get(name, now) for name in nobodys}
        for name, since in self._nobodys.items():
            if now - since >= STRAY_S:
                await asyncio.to_thread(self.remove, name)

    @contextmanager
    def _new_files(self, number: int) -> Iterator[list[tuple[str, BinaryIO]]]:
        """Give new files with their ids, to be written; none stays if that fails."""
        ids = [f"file-{token_hex(16)}" for _ in range(number)]
        try:
            with self._usable(), ExitStack() as stack:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                yield [(file_id, stack.enter_context(self.path(file_id).open("xb"))) for file_id in ids]
        except BaseException:
            for file_id in ids:
                with suppress(Unavailable):
                    self.remove(file_id)
            raise

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Raise Unavailable where the folder cannot be read or written."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or type(error).__name__
            logger.error("`files` of the router's args, %s, cannot be used: %s", self._folder.absolute(), reason)
            told = f"The folder of files cannot be used ({reason}); it is set by `files` in the router's `args`."
            raise Unavailable(told, None, {"retry_after_s": RETRY_S}) from error

    def _without_result(self, batch: BatchCard, kept: Kept) -> str:
        line = kept.line
        outcome = batch.outcome.value
        try:
            custom_id = self.read(batch.input_file, line.offset, line.length)["custom_id"]
        except FileNotFoundError:
            custom_id = None
        error = {"code": f"batch_{outcome}", "message": REASONS.get(outcome, outcome)}
        entry = {"id": request_id(line.batch, line.number), "custom_id": custom_id, "response": None, "error": error}
        return json.dumps(entry)


def request_id(batch: str, number: int) -> str:
    """Return what the output, logs and the ledger call the request of a line."""
    return f"batch_req_{batch.removeprefix('batch_')}_{number}"


class _Checking:
    """Requests and errors of an input, as far as it was read."""

    def __init__(self, endpoint: str) -> None:
        self.spans: list[tuple[int, int]] = []
        self.errors: list[InputError] = []
        self._endpoint = endpoint
        self._model: str | None = None
        self._ids: set[str] = set()

    def refuse(self, line: int | None, code: str, message: str, param: str | None = None) -> None:
        self.errors.append(InputError(code=code, message=message, line=line, param=param))

    def add(self, number: int, offset: int, text: bytes) -> None:
        self.spans.append((offset, len(text)))
        try:
            entry = json.loads(text)
            check_depth(entry, MAX_DEPTH)
        except (ValueError, RecursionError, InvalidRequest):
            self.refuse(number, "invalid_json_line", "This line cannot be read as JSON, or is nested too deeply.")
            return
        for param, code, must, is_right in self._rules(entry):
            if not is_right:
                self.refuse(number, code, f"{param} must {must}.", param)
                return
        self._ids.add(entry["custom_id"])
        self._model = entry["body"]["model"]

    def _rules(self, entry: object) -> Iterator[tuple[str, str, str, bool]]:
        """Yield what a line must be, each with whether it is so; the next one holds only where that is."""
        yield "The line", "invalid_json_line", "be a JSON object", isinstance(entry, dict)
        assert isinstance(entry, dict)
        own_id, body = entry.get("custom_id"), entry.get("body")
        is_id = isinstance(own_id, str) and 0 < len(own_id) <= MAX_ID_CHARS
        yield "custom_id", "invalid_custom_id", f"be a string of 1 to {MAX_ID_CHARS} characters", is_id
        yield "custom_id", "duplicate_custom_id", "be another one in every line", own_id not in self._ids
        yield "method", "invalid_method", "be POST", entry.get("method") == "POST"
        is_endpoint = entry.get("url") == self._endpoint
        yield "url", "invalid_url", f"be the batch's endpoint, {self._endpoint}", is_endpoint
        yield "body", "invalid_body", "be an object", isinstance(body, dict)
        assert isinstance(body, dict)
        model = body.get("model")
        is_name = isinstance(model, str) and 0 < len(model) <= MAX_MODEL_CHARS and model.isprintable()
        yield "body.model", "missing_required_parameter", "be the name of a model", is_name
        is_same = self._model in (None, model)
        yield "body.model", "mismatched_model", f"be {self._model!r} as in the lines before", is_same
        yield "body.stream", "invalid_body", "be absent or false", not body.get("stream")

    def result(self) -> Checked:
        if not self.spans and not self.errors:
            self.refuse(None, "empty_file", "The input file has no line.", "input_file_id")
        if len(self.spans) > MAX_LINES:
            self.refuse(None, "too_many_tasks", f"The input file has more than {MAX_LINES} lines.", "input_file_id")
        if self.errors:
            return Checked(errors=tuple(self.errors[:MAX_ERRORS]))
        return Checked(model=self._model or "", spans=tuple(self.spans))
