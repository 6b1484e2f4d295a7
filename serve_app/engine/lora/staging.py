"""Takes adapters in while the engine runs: reads and binds them beside the steps, and has the engine try them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from serve_app.core.cards import AdapterCard, AdapterRecord
from serve_app.core.errors import AdapterUnusable, EngineFailed, ServeError
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.engine import Engine
from serve_app.engine.lora.adapter import Adapter, bind_adapter
from serve_app.engine.lora.matching import AdapterRefused, Matcher
from serve_app.engine.lora.registration import keeps_prefix
from serve_app.engine.lora.sandboxed_matching import match_sandboxed
from serve_app.kernels.openmp import compute_alone

logger = logging.getLogger(__name__)

MORE_TENSORS = 4096
"""In a file beyond those that its configuration names."""
LARGEST_FILE = 4
"""Times `adapter_bytes`: a file may have its numbers in 64 bits where the model has 16."""
ENGINE_S = 300.0
"""The engine has answered by then, or never will."""


class Staging:
    """Takes adapters in, one after the other, in a thread of its own; sequences are computed meanwhile.

    For one that is staged,

    1. match its configuration, in the sandbox if it is new;
    2. bind its tensors;
    3. read and judge their values;
    4. have the engine wrap the modules that no adapter changed before;
    5. copy it into a slot;
    6. compute a few tokens with it between two steps.

    A refusal at any of these leaves nothing behind.

    post:    has the engine's thread make a call before its next step
    matcher: that knows the configurations of adapters which were there at start; None is made with the first
    """

    def __init__(
        self, core: Engine, post: Callable[[Callable[[], None]], None], matcher: Matcher | None = None
    ) -> None:
        self._core = core
        self._post = post
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging", initializer=compute_alone)
        self._matcher = matcher
        self._answers: set[Future[None]] = set()

    def bind(self, record: AdapterRecord) -> Future[AdapterCard]:
        """Make an adapter known, as it was tried before; its values are judged when they are first read.

        The future fails with AdapterUnusable, which says why.
        """
        return self._thread.submit(self._taken, record, self._bind)

    def stage(self, record: AdapterRecord) -> Future[AdapterCard]:
        """Make an adapter known, judge its values, bring it into a slot and try it.

        The future fails with AdapterUnusable, which says why, or with Overloaded while all slots are in use.
        """
        return self._thread.submit(self._taken, record, self._stage)

    def is_resident(self, version: str) -> bool:
        """Return whether a version is in a slot, or on its way there."""
        return version in self._core.residency.versions

    def keep(self, versions: frozenset[str]) -> None:
        """Let these leave their slots last, and no others: their files were overwritten."""
        self._post(lambda: self._core.keep_adapters(versions))

    def drop(self, versions: frozenset[str]) -> Future[frozenset[str]]:
        """Forget adapters; those that sequences use stay. The future gives those that are gone."""
        gone: Future[frozenset[str]] = Future()
        self._post(lambda: gone.set_result(self._core.drop_adapters(versions)))
        return gone

    def close(self) -> None:
        """Give up what is being staged."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        for answer in tuple(self._answers):
            if not answer.done():
                answer.set_exception(EngineFailed("The engine has ended."))

    def _taken(self, record: AdapterRecord, take: Callable[[AdapterRecord], Adapter]) -> AdapterCard:
        try:
            adapter = take(record)
        except ServeError:
            raise
        except AdapterRefused as error:
            raise AdapterUnusable.because(record.name, str(error)) from error
        except Exception as error:  # whatever is wrong with one adapter's files, the model is served
            logger.exception("adapter %s could not be read", record.name)
            raise AdapterUnusable.because(record.name, f"its files could not be read: {error}") from error
        for note in adapter.notes:
            logger.warning("adapter %s: %s", record.name, note)
        prefix = keeps_prefix(adapter.changes, self._core.model.module)
        return replace(record.card(), rank=adapter.rank, keeps_prefix=prefix)

    def _bind(self, record: AdapterRecord) -> Adapter:
        adapter = self._bound(record)
        self._ask(lambda _: self._core.admit(adapter))
        return adapter

    def _stage(self, record: AdapterRecord) -> Adapter:
        core, adapter = self._core, self._bound(record)
        weights, is_new = core.bank.read(adapter), False

        def begin(done: Future[None]) -> bool:
            nonlocal is_new
            is_new = not core.bank.knows(adapter.version)
            core.admit(adapter)
            core.try_adapter(adapter.version, weights, done)
            return True

        try:
            self._ask(begin)
        except (AdapterRefused, ServeError):
            if is_new:
                self.drop(frozenset({adapter.version}))
            raise
        return adapter

    def _bound(self, record: AdapterRecord) -> Adapter:
        """Bind to the model what the files hold, within bounds. Raises AdapterRefused."""
        model, bank = self._core.model, self._core.bank
        if not bank.num_slots:
            raise AdapterRefused("the model serves none: its `max_adapters` is 0")
        if record.reason is not None or record.weights is None:
            raise AdapterRefused(record.reason or "it has no weights")
        most, size = bank.max_bytes, record.weights.stat().st_size
        if most is not None and size > LARGEST_FILE * most:
            raise AdapterRefused(
                f"its file has {size} bytes; `adapter_bytes` is {most}, a file may have {LARGEST_FILE} times that"
            )
        if self._matcher is None:
            self._matcher = matcher_of(model)
        match_sandboxed(self._matcher, record.fields)
        targets = self._matcher.match(record.fields).targets
        most_tensors = MORE_TENSORS + 3 * sum(target.experts or 1 for target in targets)
        if len(record.tensors) > most_tensors:
            raise AdapterRefused(f"it has {len(record.tensors)} tensors, and its configuration names {most_tensors}")
        adapter = bind_adapter(record, self._matcher, is_divided=model.shard is not None)
        if most is not None and (taken := bank.bytes_in_slot(adapter)) > most:
            raise AdapterRefused(_too_large(taken, most))
        bank.warm_kernels()
        return adapter

    def _ask(self, call: Callable[[Future[None]], object]) -> None:
        """Have the engine's thread make a call; wait until that, or the trial that the call began, is over."""
        done: Future[None] = Future()
        self._answers.add(done)

        def run() -> None:
            try:
                is_begun = call(done)
            except Exception as error:
                logger.exception("an adapter could not be taken in")
                done.set_exception(error)
            else:
                if not is_begun:
                    done.set_result(None)

        self._post(run)
        try:
            done.result(ENGINE_S)
        finally:
            self._answers.discard(done)


def matcher_of(model: LoadedModel) -> Matcher:
    """Return what matches configurations with a model."""
    return Matcher.of(model.module, sees=model.tower is not None)


def cards_that_fit(core: Engine, cards: tuple[AdapterCard, ...]) -> tuple[AdapterCard, ...]:
    """Return the cards of adapters that were found at start, with a reason for those that take more than all bytes."""
    most = core.bank.max_bytes
    return tuple(
        replace(card, reason=_too_large(size, most))
        if card.is_usable and most is not None and (size := core.bank.bytes_of(card.version)) > most
        else card
        for card in cards
    )


def _too_large(size: int, most: int) -> str:
    return f"it takes {size} bytes of memory, and `adapter_bytes` is {most} for all: raise that"
