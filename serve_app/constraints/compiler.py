"""Compiles each constraint once, in the sandbox and then here, and keeps the last ones in a cache."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer

from serve_app.constraints.compilation import Grammar, build_matcher, prepare
from serve_app.constraints.limits import DEFAULT_LIMITS, ConstraintLimits, Refusal
from serve_app.constraints.vocabulary import Encode, Matcher, Vocabulary
from serve_app.core.errors import EngineFailed, Overloaded
from serve_app.core.request import Constraint, GenerationRequest
from serve_app.core.shares import CacheEntry, next_to_evict
from serve_app.sandbox.fork_server import ForkServer

Key = tuple[str, bytes]
"""The salt of the tenants that may find it, and the digest of what was compiled."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compiled:
    """A constraint in the vocabulary of one model; texts begin from copies of it."""

    first: LLMatcher
    num_words: int
    formats: tuple[str, ...]

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of a text; takes some microseconds."""
        return Matcher(self.first.deep_copy(), num_words=self.num_words, formats=self.formats)


@dataclass(frozen=True, slots=True)
class _Entry:
    flow: str
    num_chars: int
    task: asyncio.Future[Compiled]


class Compiler:
    """Compiles constraints on threads of its own; lives on one event loop.

    1. The sandbox tries the constraint. 2. What passed is built here, which takes as long and releases the GIL. 3. The
    cache keeps compiled and refused constraints. Only requests of the same salt share an entry; otherwise response
    times would tell one tenant what another has sent. The flow that holds most loses its entries first.

    make_vocabulary: called once, in a thread, when it is first needed
    encode:          cuts text into tokens, where the library cannot do that by itself; called from any thread
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        *,
        encode: Encode | None = None,
        limits: ConstraintLimits = DEFAULT_LIMITS,
    ) -> None:
        self._make_vocabulary = make_vocabulary
        self._encode = encode
        self._limits = limits
        self._slots = TrialSlots(limits)
        self._pool = ThreadPoolExecutor(2 * limits.max_trials + limits.max_slow, thread_name_prefix="constraints")
        self._first = ThreadPoolExecutor(1, thread_name_prefix="constraints-first")
        self._kept: OrderedDict[Key, _Entry] = OrderedDict()
        self._num_chars = 0
        self._num_waiting = 0
        self.num_compiled = 0

    async def warm(self) -> None:
        """Do beforehand what the first constraint would wait for: the vocabulary, and the process of trials."""
        await asyncio.get_running_loop().run_in_executor(self._first, self._begin_all)

    async def compile_all(self, requests: Iterable[GenerationRequest]) -> Mapping[str, Compiled]:
        """Compile the constraints of requests, each once, and return them by request id.

        Raises InvalidRequest where one is not taken.
        """
        made, found = dict[tuple[str, Constraint], Compiled](), dict[str, Compiled]()
        for request in requests:
            if (constraint := request.constraint) is None:
                continue
            wanted = request.cache_salt, constraint
            if wanted not in made:
                made[wanted] = await self.compile(constraint, salt=request.cache_salt, flow=request.share.flow)
            found[request.request_id] = made[wanted]
        return found

    async def compile(self, constraint: Constraint, *, salt: str = "", flow: str = "") -> Compiled:
        """Compile a constraint, or find it compiled. Raises InvalidRequest if it is refused, Overloaded if too many
        wait.

        salt: of those who may find it;  flow: that asks
        """
        key = salt, constraint.digest
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            self._begin(key, constraint, flow)
        try:
            return await asyncio.shield(self._kept[key].task)
        except Refusal as refusal:
            raise refusal.of(constraint) from refusal

    def close(self) -> None:
        """End the threads and the process of trials."""
        for each in self._kept.values():
            each.task.cancel()
        if "_trials" in self.__dict__:
            self._trials.close()
        for pool in (self._first, self._pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, key: Key, constraint: Constraint, flow: str) -> None:
        if self._num_waiting >= self._limits.max_waiting:
            raise Overloaded(
                f"More than {self._limits.max_waiting} constraints wait to be compiled.", None, {"retry_after_s": 1}
            )
        self._num_waiting += 1
        task = asyncio.get_running_loop().create_task(self._compiled(constraint))
        self._kept[key] = _Entry(flow, len(constraint.source), task)
        self._num_chars += len(constraint.source)
        task.add_done_callback(lambda done: self._note_end(key, done))
        self._forget_some()

    def _note_end(self, key: Key, done: asyncio.Future[Compiled]) -> None:
        """Keep what is certain; what failed for want of time may be asked for again."""
        self._num_waiting -= 1
        if done.cancelled() or isinstance(done.exception(), OutOfTime | EngineFailed | Overloaded):
            self._forget(key)
        self._forget_some()

    def _forget_some(self) -> None:
        """Evict until the cache is within its bounds; a small entry counts as an average one."""
        limits = self._limits
        place = limits.max_cached_chars // limits.max_cached
        while len(self._kept) > limits.max_cached or self._num_chars > limits.max_cached_chars:
            key = next_to_evict(
                CacheEntry(key=key, flow=each.flow, size=max(each.num_chars, place), may_go=each.task.done())
                for key, each in self._kept.items()
            )
            if key is None:
                return  # they end, and then it is looked at again
            self._forget(key)

    def _forget(self, key: Key) -> None:
        if (entry := self._kept.pop(key, None)) is not None:
            self._num_chars -= entry.num_chars

    async def _compiled(self, constraint: Constraint) -> Compiled:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._first, lambda: (self._trials, self._tokenizer))
        self.num_compiled += 1
        return await self._slots.run(self._pool, lambda seconds: self._compile(constraint, seconds))

    def _begin_all(self) -> None:
        """Build the vocabulary and start the sandbox; runs in the first thread."""
        assert self._tokenizer is not None
        self._trials.begin()

    def _compile(self, constraint: Constraint, seconds: float) -> Compiled:
        """Try a constraint for at most so many seconds, then build it here; runs in a thread."""
        grammar = self._trials.run(constraint, max_wall_s=seconds)
        matcher = build_matcher(grammar.text, self._tokenizer, has_rules=grammar.has_rules)
        if matcher.is_error():
            raise Refusal("it cannot be compiled a second time")
        return Compiled(first=matcher, num_words=self._vocabulary.num_words, formats=grammar.formats)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._make_vocabulary()

    @cached_property
    def _trials(self) -> Trials:
        return Trials(self._vocabulary, self._limits)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._vocabulary.tokenizer(self._encode)


Result = TypeVar("Result")
COME_AGAIN_S = 2


class TrialSlots:
    """Slots for trials: quick ones, in which every trial begins, and slow ones, for trials that take longer.

    However many constraints are slow, other ones find a quick slot within moments. Lives on one event loop.
    """

    def __init__(self, limits: ConstraintLimits) -> None:
        self._limits = limits
        self._free = asyncio.Semaphore(limits.max_trials)
        self.num_slow = 0

    async def run(self, executor: Executor, work: Callable[[float], Result]) -> Result:
        """Run the work in a thread, given the seconds that it may take.

        Raises Overloaded if no slot is free in time, or if the clock ended the trial.
        """
        try:
            await asyncio.wait_for(self._free.acquire(), self._limits.max_wait_s)
        except TimeoutError:
            raise _overloaded("Too many constraints are being compiled.") from None
        with ExitStack() as slot:
            slot.callback(self._free.release)
            has_room = self.num_slow < self._limits.max_slow
            seconds = self._limits.max_wall_s if has_room else self._limits.quick_s  # the kernel keeps to it
            running = asyncio.get_running_loop().run_in_executor(executor, copy_context().run, work, seconds)
            try:
                with suppress(TimeoutError):
                    return await asyncio.wait_for(asyncio.shield(running), self._limits.quick_s)
                slot.close()
                return await self._slow(running)
            except OutOfTime:  # it had not used up its processor time, so others had the processors
                raise _overloaded("The machine was too busy to compile this constraint in time.") from None

    async def _slow(self, running: asyncio.Future[Result]) -> Result:
        self.num_slow += 1
        try:
            return await running
        finally:
            self.num_slow -= 1


def _overloaded(message: str) -> Overloaded:
    return Overloaded(message, None, {"retry_after_s": COME_AGAIN_S})


logger = logging.getLogger(__name__)


class OutOfTime(Refusal):
    """The clock ended the trial before its processor time was used up: the machine is busy, not the sender to blame."""


class Trials:
    """Tries constraints in child processes; threads may share it.

    server: the process that they fork from; it begins with the first trial, and again if it was lost
    """

    def __init__(self, vocabulary: Vocabulary, limits: ConstraintLimits) -> None:
        self._limits = limits
        self.server = ForkServer(prepare, (vocabulary, limits), doing="tries constraints")

    def begin(self) -> None:
        """Begin the process, so that the first trial does not wait for it. Raises EngineFailed."""
        self.server.open().connection.close()

    def run(self, constraint: Constraint, *, max_wall_s: float | None = None) -> Grammar:
        """Try a constraint; block for `max_wall_s` at most (else that of the limits), and until the process began.

        Raises Refusal, EngineFailed.
        """
        wall_s = self._limits.max_wall_s if max_wall_s is None else max_wall_s
        job = json.dumps({"kind": constraint.kind, "source": constraint.source, "wall_s": wall_s}).encode()
        child = self.server.open()
        with child.connection:
            started = time.monotonic()
            if not child.take(job):
                raise EngineFailed("The process that tries constraints ended before it began with this one.")
            try:
                answer = child.answer(slow_after_s=self._limits.slow_after_s, wall_s=wall_s)
            except (EOFError, OSError) as error:
                seconds = time.monotonic() - started
                raise self._ended(constraint, seconds, wall_s) from error
        if "refused" in answer:
            raise Refusal(str(answer["refused"]), str(answer["path"]))
        return Grammar(**{**answer, "formats": tuple(answer["formats"])})

    def close(self) -> None:
        """End the process; trials that run end with it or by their own clocks."""
        self.server.close()

    def _ended(self, constraint: Constraint, seconds: float, wall_s: float) -> Refusal:
        logger.info(
            "a %s of %d characters was not compiled in %.2f s", constraint.kind, len(constraint.source), seconds
        )
        if seconds >= wall_s * 0.95:
            return OutOfTime("it takes too long to compile")
        return Refusal("it takes too much time or memory to compile")
