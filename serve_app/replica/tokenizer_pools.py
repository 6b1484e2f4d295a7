"""Threads that tokenize: a short prompt never waits for a long one, nor one flow for another flow's many prompts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from threading import Lock
from typing import Any, TypeVar

from serve_app.core.backend import LONG_TEXT, text_size
from serve_app.core.errors import InvalidRequest, Overloaded
from serve_app.core.machine import take_leftovers
from serve_app.core.prompt import Conversation, Rendering, Tokenization, TokenizeRequest
from serve_app.core.request import GenerationRequest
from serve_app.core.shares import Share
from serve_app.text.tokenizer import TextTokenizer

OLDEST_EVERY = 4
"""Every fourth time a flow's oldest work is next, not its shortest. So nothing waits for ever."""
Result = TypeVar("Result")
POOLS = ((LONG_TEXT, 2), (524_288, 1), (None, 1))
"""Characters and ids of all prompts together, at most, and threads. Long work is bounded to a thread, whoever sends it,
and takes what steps leave of a core."""
HEADROOM = 4
"""Room that is asked for, of long texts: so many times what they take, so that some is left for shorter ones."""
RETRY_S = 5
MAX_WAITING = 32
"""Calls of `Tokenizations`, the one that runs included."""


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """The tokenization of one call's texts. size: in characters"""

    share: Share
    size: int
    do: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        """Do the work, unless its caller has left."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            found = self.do()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(found)


class FlowQueue:
    """The waiting work of one flow."""

    def __init__(self) -> None:
        self._waiting: dict[int, Work] = {}
        self._by_size: list[tuple[int, int]] = []
        self._num_added = self._num_taken = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work: Work) -> None:
        self._num_added += 1
        self._waiting[self._num_added] = work
        heappush(self._by_size, (work.size, self._num_added))

    def take(self) -> Work:
        """Take the shortest work; of equal ones the first. There must be some."""
        self._num_taken += 1
        if self._num_taken % OLDEST_EVERY == 0:
            return self._waiting.pop(next(iter(self._waiting)))
        while True:
            _, number = heappop(self._by_size)
            if number in self._waiting:
                return self._waiting.pop(number)

    def discard(self, work: Work) -> None:
        self._waiting = {number: each for number, each in self._waiting.items() if each is not work}


class TextQueue:
    """Shares the threads among flows by characters, divided by the flows' weights.

    A flow that comes back has no credit: it begins at the level of the waiting flows. Not thread-safe.
    """

    def __init__(self) -> None:
        self._flows: dict[str, FlowQueue] = {}
        self._given: dict[str, float] = {}
        self._level = 0.0

    def add(self, work: Work) -> None:
        flow = work.share.flow
        if flow not in self._flows:
            self._flows[flow] = FlowQueue()
            self._given[flow] = max(self._given.get(flow, 0.0), self._level)
        self._flows[flow].add(work)

    def take(self) -> Work | None:
        """Take the work of the flow with the least characters so far; None if no work waits."""
        if not self._flows:
            return None
        flow = min(self._flows, key=self._given.__getitem__)
        work = self._flows[flow].take()
        self._level = self._given[flow]
        self._given[flow] += work.size / work.share.weight
        self._forget()
        return work

    def discard(self, work: Work) -> None:
        """Remove work whose caller has left."""
        if (line := self._flows.get(work.share.flow)) is not None:
            line.discard(work)
            self._forget()

    def _forget(self) -> None:
        """Forget empty flows, and the counts of flows that others have caught up with."""
        self._flows = {flow: line for flow, line in self._flows.items() if line}
        if not self._flows:
            self._given, self._level = {}, 0.0
        self._given = {flow: each for flow, each in self._given.items() if flow in self._flows or each > self._level}


class TokenizerPool:
    """One pool of threads. Each thread that is free does the work whose turn it is then."""

    def __init__(self, name: str, num_threads: int, *, is_long: bool) -> None:
        begin = take_leftovers if is_long else None
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=begin)
        self._queue = TextQueue()
        self._lock = Lock()

    async def run(self, work: Work) -> Any:
        """Do it when its turn has come; or not at all, where nobody waits for it until then."""
        with self._lock:
            self._queue.add(work)
        try:
            self._pool.submit(self._take_turn)
            return await asyncio.wrap_future(work.future)
        finally:
            with self._lock:
                self._queue.discard(work)

    def close(self) -> None:
        """Wait for running work and drop the rest."""
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            while (work := self._queue.take()) is not None:
                work.future.cancel()

    def _take_turn(self) -> None:
        with self._lock:
            work = self._queue.take()
        if work is not None:
            work.run()


class TokenizerPools:
    """Pools of threads for short, long and very long texts. Lives on one event loop.

    max_waiting_chars: of long texts that wait; None is no bound
    """

    def __init__(self, max_waiting_chars: int | None = None) -> None:
        self._max_waiting_chars = max_waiting_chars
        self._num_waiting: Counter[str] = Counter()
        self._pools = [
            (most, TokenizerPool(f"tokenizer-{number}", num_threads, is_long=number > 0))
            for number, (most, num_threads) in enumerate(POOLS)
        ]

    async def run(self, requests: Items[GenerationRequest], work: Callable[[], Result]) -> Result:
        """Do the work of these requests, all of one flow, in the pool of their size."""
        size = text_size(requests)
        pool = next(pool for most, pool in self._pools if most is None or size <= most)
        found: Result = await pool.run(Work(share=_share(requests), size=size, do=work))
        return found

    @contextmanager
    def room_for(self, requests: Items[GenerationRequest]) -> Iterator[None]:
        """Count long texts as waiting while the context is entered; short texts are bounded by their number.

        Raises Overloaded if they have no room. A flow has to leave others as much free room as it takes.
        """
        size, flow = text_size(requests), _share(requests).flow
        if size <= LONG_TEXT:
            yield
            return
        self._check_room(size, flow)
        self._num_waiting[flow] += size
        try:
            yield
        finally:
            self._num_waiting[flow] -= size
            self._num_waiting += Counter()  # forgets flows that have nothing

    def close(self) -> None:
        """Wait for running work and drop the rest."""
        for _, pool in self._pools:
            pool.close()

    def _check_room(self, size: int, flow: str) -> None:
        most, num_waiting = self._max_waiting_chars, self._num_waiting.total()
        if most is None or not num_waiting or self._num_waiting[flow] + HEADROOM * size <= most - num_waiting:
            return
        raise Overloaded(
            f"{size} more characters have no room beside {num_waiting} that wait to be cut into tokens, of {most}.",
            None,
            {"retry_after_s": RETRY_S},
        )


def _share(requests: Items[GenerationRequest]) -> Share:
    return requests[0].share if requests else Share()


class Tokenizations:
    """Has a thread of its own, so that the prompt of a completion never waits for one of these.

    max_chars: of one text
    render:    what the model's chat template makes of a conversation
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        max_chars: int,
        render: Callable[[Conversation], Awaitable[Rendering]],
    ) -> None:
        self._tokenizer = tokenizer
        self._render = render
        self._max_chars = max_chars
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._num_waiting = 0

    async def tokenize(self, request: TokenizeRequest) -> Tokenization:
        """Raises InvalidRequest where the text is too long, Overloaded where too many wait."""
        foreign: tuple[int, ...] = ()
        if request.conversation is not None:
            if images := request.conversation.images:
                alone = "be absent, as how many tokens an image has is known when it is seen"
                raise InvalidRequest.refusing(images[0].name, must=alone, found="an image")
            rendering = await self._render(request.conversation)
            request, foreign = replace(request, text=rendering.text), rendering.foreign
        if len(request.text) > self._max_chars:
            raise InvalidRequest.refusing(
                request.param,
                must=f"be at most {self._max_chars} characters to be cut into tokens (the model's max_tokenized_chars)",
                found=str(len(request.text)),
                facts={"n_prompt_chars": len(request.text), "max_tokenized_chars": self._max_chars},
            )
        found = await self._run(lambda: self._tokenizer.tokenize(request, foreign))
        return found if request.conversation is None else replace(found, text=request.text)

    async def detokenize(self, token_ids: Items[int]) -> str:
        """Raises Overloaded where too many wait."""
        return await self._run(lambda: self._tokenizer.untokenize(token_ids))

    def close(self) -> None:
        self._pool.shutdown()

    async def _run(self, work: Callable[[], Result]) -> Result:
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"More than {MAX_WAITING} texts wait to be tokenized.", None, {"retry_after_s": 1})
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_waiting -= 1
