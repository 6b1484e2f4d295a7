"""Has constraints tried in a process apart, which a hostile one may take as long as it is allowed to and no longer."""

from __future__ import annotations

import json
import logging
import time
from multiprocessing.connection import Connection
from typing import Any

from serve_app.constraints.compilation import Grammar
from serve_app.constraints.limits import ConstraintLimits
from serve_app.constraints.refusal import Refusal
from serve_app.constraints.trial_process import prepare
from serve_app.constraints.vocabulary import Vocabulary
from serve_app.core.errors import EngineFailed
from serve_app.core.request import Constraint
from serve_app.sandbox.fork_server import ForkServer, await_answer

logger = logging.getLogger(__name__)


class OutOfTime(Refusal):
    """The clock ended the trial before its processor time was used up: the machine is busy, not the sender to blame."""


class Trials:
    """Threads may share it. server: the process, which begins with the first trial, and again where it was lost"""

    def __init__(self, vocabulary: Vocabulary, limits: ConstraintLimits) -> None:
        self._limits = limits
        self.server = ForkServer(prepare, (vocabulary, limits), doing="tries constraints")

    def begin(self) -> None:
        """Begin the process, so that the first trial does not wait for it. Raises EngineFailed."""
        self.server.open().close()

    def run(self, constraint: Constraint, *, max_wall_s: float | None = None) -> Grammar:
        """Blocks for so long at most, `max_wall_s` of the limits unless it is said, and for the process to begin.

        Raises Refusal, EngineFailed.
        """
        wall_s = self._limits.max_wall_s if max_wall_s is None else max_wall_s
        with self.server.open() as connection:
            started = time.monotonic()
            try:
                answer = self._ask(connection, constraint, wall_s)
            except (EOFError, OSError) as error:
                seconds = time.monotonic() - started
                raise self._ended(constraint, seconds, wall_s) from error
        if "refused" in answer:
            raise Refusal(str(answer["refused"]), str(answer["path"]))
        return Grammar(text=answer["grammar"], formats=tuple(answer["formats"]), has_rules=bool(answer["has_rules"]))

    def close(self) -> None:
        """End the process; trials that run end with it or by their own clocks."""
        self.server.close()

    def _ask(self, connection: Connection, constraint: Constraint, wall_s: float) -> dict[str, Any]:
        """Raises EngineFailed where no child began, EOFError or OSError where it was ended."""
        try:
            process_id = int(connection.recv_bytes())  # after the process has begun
        except (EOFError, OSError) as error:  # nothing of the constraint was looked at
            raise EngineFailed("The process that tries constraints ended before it began with this one.") from error
        job = {"kind": constraint.kind, "source": constraint.source, "wall_s": wall_s}
        connection.send_bytes(json.dumps(job).encode())
        told, _ = await_answer(connection, process_id, courtesy_s=self._limits.courtesy_s, wall_s=wall_s)
        answer: dict[str, Any] = json.loads(told)
        return answer

    def _ended(self, constraint: Constraint, seconds: float, wall_s: float) -> Refusal:
        logger.info(
            "a %s of %d characters was not compiled in %.2f s", constraint.kind, len(constraint.source), seconds
        )
        if seconds >= wall_s * 0.95:
            return OutOfTime("it takes too long to compile")
        return Refusal("it takes too much time or memory to compile")
