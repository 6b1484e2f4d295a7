"""Deltas on their way to one router: what has gathered since the last frame leaves as one frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from serve_app.core.delta import Delta, Frame, Load, PromptReport, TokenLogprob
from serve_app.core.ledger import Spent

# What Python takes for these, about; the text of tokens is shared by all that mention them.
DELTA_BYTES = 200
LOGPROB_BYTES = 150
ID_BYTES = 8


class Outbox:
    """A buffer that is emptied as fast as its reader reads, without a timer.

    A reader that keeps up gets a frame per step; a slower one gets fewer, larger frames. Of one that does not read,
    the deltas of a sequence are joined into one, so that what is kept grows with what was generated and not with the
    number of steps.

    max_deltas: pending before deltas of the same sequence are joined
    num_bytes:  what is pending takes in memory, about
    """

    def __init__(self, max_deltas: int) -> None:
        self._deltas: list[Delta] = []
        self._load = Load()
        self._spent: dict[str, Spent] = {}
        self._has_news = asyncio.Event()
        self._is_closed = False
        self._max_deltas = max_deltas
        self._joins_at = max_deltas
        self.num_bytes = 0
        self.has_reader = False

    @property
    def num_deltas(self) -> int:
        return len(self._deltas)

    def put(self, deltas: Sequence[Delta], load: Load) -> None:
        self._deltas += deltas
        self._load = load
        self._spent.update((each.flow, each) for each in load.spent)
        self.num_bytes += sum(map(_size, deltas))
        if len(self._deltas) > self._joins_at:
            self._join()
        self._has_news.set()

    def drop(self) -> list[Delta]:
        """Take out and return all that is pending."""
        deltas, self._deltas = self._deltas, []
        self.num_bytes = 0
        self._joins_at = self._max_deltas
        return deltas

    def close(self) -> None:
        """End the stream when what is pending was read."""
        self._is_closed = True
        self._has_news.set()

    async def frames(self) -> AsyncGenerator[Frame, None]:
        """Yield frames until closed and empty; to one reader only."""
        self.has_reader = True
        while self._has_any or not self._is_closed:
            if self._has_any:
                yield Frame(deltas=tuple(self.drop()), load=self._take_load())
            else:
                self._has_news.clear()
                await self._has_news.wait()

    @property
    def _has_any(self) -> bool:
        """Whether there is something to be told: deltas, or of flows what was spent."""
        return bool(self._deltas or self._spent)

    def _take_load(self) -> Load:
        """The last one, with what was spent since the last frame."""
        spent, self._spent = self._spent, {}
        is_of_last_step = len(spent) == len(self._load.spent)
        return self._load if is_of_last_step else replace(self._load, spent=tuple(spent.values()))

    def _join(self) -> None:
        """Join the deltas of each sequence; next when as many again have come, so that each is joined seldom."""
        by_sequence: dict[tuple[str, int], list[Delta]] = {}
        for delta in self._deltas:
            by_sequence.setdefault((delta.request_id, delta.sample), []).append(delta)
        self._deltas = [joined(deltas) for deltas in by_sequence.values()]
        self.num_bytes = sum(map(_size, self._deltas))
        self._joins_at = max(self._max_deltas, 2 * len(self._deltas))


def joined(deltas: Sequence[Delta]) -> Delta:
    """Give the one delta that says what these deltas of one sequence say, in their order."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        prompt=next((delta.prompt for delta in deltas if delta.prompt is not None), None),
    )


def _size(delta: Delta) -> int:
    num_bytes = DELTA_BYTES + len(delta.text) + ID_BYTES * len(delta.token_ids) + _size_of_logprobs(delta.logprobs)
    if delta.recording is not None:
        num_bytes += delta.recording.num_bytes
    return num_bytes + (_size_of_report(delta.prompt) if delta.prompt is not None else 0)


def _size_of_report(report: PromptReport) -> int:
    num_bytes = len(report.text or "") + ID_BYTES * len(report.token_ids or ())
    return num_bytes + _size_of_logprobs(report.logprobs or ()) + _size_of_logprobs(report.whole_logprobs or ())


def _size_of_logprobs(logprobs: Iterable[TokenLogprob]) -> int:
    return sum(LOGPROB_BYTES * (1 + len(entry.top)) for entry in logprobs)
