"""The folder of files: what tenants sent and what batches wrote, each under its id. All routers share the folder."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO, Protocol

from serve_app.core.batches import MAX_LINES, BatchCard, Checked, InputError, Kept, NewFile

MAX_ERRORS = 100
"""Of one input file that are told."""
MAX_ID_CHARS = 512
STRAY_S = 600.0
"""For so long a file may be nobody's before it is removed: one that is being written has no row yet."""
REASONS = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed, as its batch was cancelled.",
}


class Ask(Protocol):
    """Calls a method of Accounts that is about batches. Raises the ServeError that it answers."""

    def __call__(self, method: str, *arguments: object) -> Awaitable[object]: ...


class BatchFiles:
    """Every method but `strays` blocks, and is for a worker thread.

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
        file_id = f"file-{token_hex(16)}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with self.path(file_id).open("xb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
                return file_id, target.tell()
        except BaseException:
            self.remove(file_id)
            raise

    def remove(self, file_id: str) -> None:
        self.path(file_id).unlink(missing_ok=True)

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
                for number, text in enumerate(source, start=1):
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
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        named = {"output_file_id": "output", "error_file_id": "error"}
        ids = {name: f"file-{token_hex(16)}" for name in named}
        num_kept, sizes = 0, dict.fromkeys(named, 0)
        opened = {name: self.path(file_id).open("xb") for name, file_id in ids.items()}
        try:
            for kept in (each for page in pages for each in page):
                num_kept += kept.status is not None
                text = self._without_result(batch, kept) if kept.text is None else kept.text
                name = "output_file_id" if kept.status == 200 else "error_file_id"
                sizes[name] += opened[name].write(text.encode() + b"\n")
        finally:
            for file in opened.values():
                file.close()
            for name, size in sizes.items():
                if not size:
                    self.remove(ids[name])
        return num_kept, {
            name: NewFile(id=ids[name], name=f"{batch.id}_{named[name]}.jsonl", purpose="batch_output", num_bytes=size)
            for name, size in sizes.items()
            if size
        }

    async def sweep(self, ask: Ask) -> None:
        """Remove what is nobody's: of removed tenants, of routers that died while they wrote, expired files."""
        names = [each.name for each in self._folder.glob("file-*")]
        nobodys = await ask("strays", names) if names else []
        assert isinstance(nobodys, list)
        now = self._clock()
        self._nobodys = {name: self._nobodys.get(name, now) for name in nobodys}
        for name, since in self._nobodys.items():
            if now - since >= STRAY_S:
                self.remove(name)

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
        except (ValueError, RecursionError):
            self.refuse(number, "invalid_json_line", "This line cannot be read as JSON.")
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
        yield "body.model", "missing_required_parameter", "be the name of a model", isinstance(model, str)
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
