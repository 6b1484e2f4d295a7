"""Compiles constraints beside everything else, each once, and keeps what was asked for last."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from llguidance import LLMatcher, LLTokenizer

from serve_app.constraints.compilation import build_matcher
from serve_app.constraints.limits import DEFAULT_LIMITS, ConstraintLimits
from serve_app.constraints.matcher import Matcher
from serve_app.constraints.places import Places
from serve_app.constraints.refusal import Refusal
from serve_app.constraints.trials import OutOfTime, Trials
from serve_app.constraints.vocabulary import Encode, Vocabulary
from serve_app.core.errors import EngineFailed, Overloaded
from serve_app.core.request import Constraint, GenerationRequest
from serve_app.core.shares import CacheEntry, next_to_evict

Key = tuple[str, bytes]
"""The salt of whoever may find it, and the digest of what was compiled."""


class Compiled:
    """A constraint in the vocabulary of one model; texts begin from copies of it."""

    def __init__(self, matcher: LLMatcher, *, num_words: int, formats: tuple[str, ...]) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._formats = formats

    def matcher(self) -> Matcher:
        """At the beginning of a text; some microseconds."""
        return Matcher(self._matcher.deep_copy(), num_words=self._num_words, formats=self._formats)


@dataclass(frozen=True, slots=True)
class _Entry:
    flow: str
    num_chars: int
    task: asyncio.Future[Compiled]


class Compiler:
    """Lives on one event loop, with threads of its own.

    Each constraint is first tried in a process that may be ended; what passed is built here, which takes as long with
    Python's lock released. Equal ones are compiled once and shared, refused ones are refused again from memory; but
    only among requests of the same salt, or the time of an answer would tell one tenant what another has sent. Of what
    is kept the flow that has most gives way first.

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
        self._places = Places(limits)
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
        """By the ids of those that are constrained; each constraint once, however often it is there.

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
        """salt: of those who may find it;  flow: that asks. Raises InvalidRequest where it is not taken, Overloaded
        where too many wait."""
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
        """As many as there are too many. One that is small takes a place, and with it its part of the characters."""
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
        return await self._places.run(self._pool, lambda seconds: self._compile(constraint, seconds))

    def _begin_all(self) -> None:
        """Runs in the first thread."""
        assert self._tokenizer is not None
        self._trials.begin()

    def _compile(self, constraint: Constraint, seconds: float) -> Compiled:
        """Runs in a thread, for so long at most."""
        grammar = self._trials.run(constraint, max_wall_s=seconds)
        matcher = build_matcher(grammar.text, self._tokenizer, has_rules=grammar.has_rules)
        if matcher.is_error():
            raise Refusal("it cannot be compiled a second time")
        return Compiled(matcher, num_words=self._vocabulary.num_words, formats=grammar.formats)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._make_vocabulary()

    @cached_property
    def _trials(self) -> Trials:
        return Trials(self._vocabulary, self._limits)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._vocabulary.tokenizer(self._encode)
