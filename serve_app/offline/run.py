"""Asks every question of a file and keeps each answer; a run that was ended goes on where it was."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from secrets import token_hex
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from serve_app.core.batches import AGAIN, FAULT, OK, Answered
from serve_app.core.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from serve_app.offline.files import Question

Item = TypeVar("Item")
Ask = Callable[["Question", str], Answered]
"""Answers a question under the id of a request, refusals included. Raises Unavailable where no answer comes."""
FAULT_RESTS_S = (1.0, 4.0, 15.0)
"""Before each further attempt, if the service fails or nobody answers."""
PATIENCE_S = 600.0
"""For so long in all a service may put one request off."""
TABLE = "CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, digest BLOB, status INTEGER, line TEXT)"


def answer(question: Question, ask: Ask, request_id: str, *, sleep: Callable[[float], None] = time.sleep) -> Answered:
    """Return the answer to a question, asked again where that may help.

    Raises Unavailable if the service puts it off for too long, or does not answer.
    """
    rests, patience_s = [*FAULT_RESTS_S], PATIENCE_S
    while True:
        try:
            answered = ask(question, request_id)
        except Unavailable:
            if not rests:
                raise
            rest_s = rests.pop(0)
        else:
            if answered.status in AGAIN:
                rest_s = max(answered.retry_s, 1.0)
                patience_s -= rest_s
                if patience_s < 0:
                    raise Unavailable(f"The service has put a request off for {PATIENCE_S:g} s.")
            elif answered.status < FAULT or not rests:
                return answered
            else:
                rest_s = rests.pop(0)
        sleep(rest_s)


class Journal:
    """The last answer to each question, in an SQLite file beside the result. Any number of threads may call it.

    Raises InvalidRequest if another run has the file, or no run has written it.
    """

    def __init__(self, path: Path) -> None:
        path.touch()  # raises OSError by name where SQLite would not
        self._path, self._lock = path, Lock()
        self._store = sqlite3.connect(path, timeout=0, check_same_thread=False, isolation_level=None)
        try:
            self._store.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._store.execute("PRAGMA journal_mode = WAL")  # an answer is kept before the next one is asked for
            self._store.execute(TABLE)
        except sqlite3.DatabaseError as error:
            self._store.close()
            told = f"{path} cannot be used ({error}): another run has it, or no run has written it."
            raise InvalidRequest(f"{told} Name another --output.") from None

    def __contains__(self, question: Question) -> bool:
        """Return whether the same request was answered with 200."""
        found = self._read("SELECT digest FROM answers WHERE number = ? AND status = ?", question.number, OK)
        return bool(found == digest_of(question))

    def add(self, question: Question, answered: Answered, request_id: str) -> None:
        line = json.dumps(answered.line(request_id, question.custom_id))
        row = (question.number, digest_of(question), answered.status, line)
        with self._lock:
            self._store.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", row)

    def line(self, question: Question) -> dict[str, Any]:
        """Return the answer to a question as a line of OpenAI's output files."""
        found: dict[str, Any] = json.loads(self._read("SELECT line FROM answers WHERE number = ?", question.number))
        return found | {"custom_id": question.custom_id}

    def close(self, *, is_done: bool) -> None:
        """is_done: every request was answered with 200, so that nobody needs the file"""
        with self._lock:
            self._store.close()
        if is_done:
            self._path.unlink()

    def _read(self, query: str, *values: object) -> Any:
        with self._lock:
            found = self._store.execute(query, values).fetchone()
        return None if found is None else found[0]


def digest_of(question: Question) -> bytes:
    """Return what tells a request from others, its id left out."""
    return sha256(json.dumps([question.path, question.body], sort_keys=True).encode()).digest()


def ask_all(
    asked: Iterable[Question], ask: Ask, journal: Journal, *, num_threads: int, told: Callable[[], object]
) -> None:
    """Ask what the journal has no good answer to. told: called behind each question. Raises as `answer`."""
    run = token_hex(8)

    def work(question: Question) -> None:
        if question not in journal:
            request_id = f"batch_req_{run}_{question.number}"
            journal.add(question, answer(question, ask, request_id), request_id)
        told()

    in_threads(iter(asked), work, num_threads=num_threads)


def in_threads(items: Iterator[Item], work: Callable[[Item], object], *, num_threads: int) -> None:
    """Work through all items. After an error, or if the caller is interrupted, no further item begins.

    Raises the first error once the items that had begun are done. An interrupt does not wait for them.
    """
    lock, stopped = Lock(), Event()
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def taken() -> list[Item]:
        with lock:
            return [] if stopped.is_set() else list(islice(items, 1))

    def run() -> None:
        try:
            while some := taken():
                work(*some)
            ended.put(None)
        except BaseException as error:
            ended.put(error)

    for _ in range(num_threads):
        Thread(target=run, daemon=True).start()
    first: BaseException | None = None
    try:
        for _ in range(num_threads):
            if (error := ended.get()) is not None:
                stopped.set()
                first = first or error
    finally:
        stopped.set()
    if first is not None:
        raise first
