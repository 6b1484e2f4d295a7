"""Adapters of a model that vLLM computes: each version has a number there, and vLLM reads its files."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from safetensors.torch import load
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from serve_app.backends.vllm.options import RANKS, highest_rank
from serve_app.core.cards import AdapterCard, AdapterRecord, Residency
from serve_app.core.errors import AdapterUnusable
from serve_app.engine.lora.adapter import WeightsFile, check_values
from serve_app.engine.lora.matching import AdapterRefused
from serve_app.kernels.openmp import compute_alone

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

    from serve_app.engine.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
REFUSED = {"use_dora": "is trained with DoRA", "modules_to_save": "replaces whole modules"}
"""Fields of `adapter_config.json` that vLLM would not compute and our engine does."""


class VllmAdapters:
    """Knows which number and folder each version has. vLLM loads them when they are first used, oldest out first.

    post: has the engine's thread make a call before its next step
    used: versions of sequences that have not ended
    """

    def __init__(self, core: EngineCore, *, max_loras: int) -> None:
        self._core, self._max_loras = core, max_loras
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging", initializer=compute_alone)
        self.post: Callable[[Callable[[], None]], None] = lambda call: call()
        self.used: Callable[[], frozenset[str]] = frozenset
        self._known: dict[str, LoRARequest] = {}
        self._files: dict[str, WeightsFile] = {}
        self._held = frozenset[int]()
        self._num_made = self._num_loads = self._num_hits = 0

    def lora_of(self, sequence: Sequence) -> LoRARequest | None:
        """Return what vLLM computes a sequence with; None is the base.

        Raises AdapterUnusable if vLLM is to read the weights again and they are of another version by now.
        """
        model = sequence.request.model
        if model.adapter is None:
            return None
        known = self._known[model.version]
        self._num_hits += known.lora_int_id in self._held
        if known.lora_int_id not in self._held:
            try:
                self._files[model.version].read()  # vLLM does not look
            except AdapterRefused as error:
                must, found = "name an adapter that can be used", f"{model.name}: {error}"
                raise AdapterUnusable.refusing("model", must=must, found=found) from error
        return known

    def look(self) -> None:
        """Note what vLLM holds, and has loaded since the last look; its thread asks after whatever may change that."""
        held = frozenset(self._core.list_loras() if self._max_loras else ())
        self._num_loads += len(held - self._held)
        self._held = held

    @property
    def residency(self) -> Residency:
        """Return what vLLM holds. It tells neither how long a load took nor what its slots take."""
        versions = tuple(version for version, each in list(self._known.items()) if each.lora_int_id in self._held)
        num_loads, num_hits = self._num_loads, self._num_hits
        return Residency(versions=versions, num_slots=self._max_loras, num_loads=num_loads, num_hits=num_hits)

    def reason_against(self, record: AdapterRecord) -> str | None:
        """Return why vLLM would not load or compute an adapter, as far as that is known without its weights."""
        if record.reason is not None:
            return record.reason
        if not self._max_loras:
            return "the model serves none, as `max_adapters` in its args is 0"
        rank, most = record.card().rank, self._core.vllm_config.lora_config.max_lora_rank
        if rank > RANKS[-1]:
            return f"its rank {rank} is above {RANKS[-1]}, the most that vLLM takes; `engine: own` takes more"
        if rank > most:
            option = f"`vllm: {{max_lora_rank: {highest_rank([record])}}}`"
            return f"its rank {rank} is above {most}; {option} in the model's args allows it"
        why = next((why for name, why in REFUSED.items() if record.fields.get(name)), None)
        return why and f"it {why}, which vLLM does not compute; `engine: own` in the model's args does"

    def fault_of(self, record: AdapterRecord) -> str | None:
        """Return the reason against an adapter or, where it is read, against its values or its configuration."""
        if reason := self.reason_against(record):
            return reason
        assert record.weights is not None, "there is no reason against it"
        lora = self._core.vllm_config.lora_config
        try:
            data = WeightsFile(record.weights, record.weights_digest).read()
            helper = PEFTHelper.from_dict(dict(record.fields))
            helper.validate_legal(lora)
            check_values(load(data), lambda name: helper.get_rank_and_scaling(name)[1], dtype=lora.lora_dtype)
        except Exception as error:  # whatever is wrong with one adapter's files, the model is served
            is_told = isinstance(error, AdapterRefused | ValueError)
            return str(error) if is_told else f"its files could not be read: {error!r}"
        return None

    def know(self, record: AdapterRecord) -> AdapterCard:
        """Make an adapter known without reading it. Raises AdapterUnusable."""
        if reason := self.reason_against(record):
            raise AdapterUnusable.because(record.name, reason)
        return self._note(record, self._request(record))

    def bind(self, record: AdapterRecord) -> Future[AdapterCard]:
        """Make an adapter known that was tried before."""
        return self._in_turn(lambda: self.know(record))

    def stage(self, record: AdapterRecord) -> Future[AdapterCard]:
        """Judge an adapter beside the steps, and have vLLM load it between two of them."""
        judged = self._thread.submit(self.fault_of, record)
        return self._in_turn(lambda: self._load(record, judged.result()), after=judged)

    def is_resident(self, version: str) -> bool:
        return version in self.residency.versions

    def keep(self, versions: frozenset[str]) -> None:
        """Let these stay in memory: their files were overwritten."""
        for version in versions & self._known.keys():
            self._in_turn(partial(self._core.pin_lora, self._known[version].lora_int_id))

    def drop(self, versions: frozenset[str]) -> Future[frozenset[str]]:
        """Forget adapters but for those in use; the future gives those that are gone."""
        return self._in_turn(lambda: self._forget(versions))

    def close(self) -> None:
        """Judge no further adapter."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, record: AdapterRecord, fault: str | None) -> AdapterCard:
        if fault:
            raise AdapterUnusable.because(record.name, fault)
        request = self._request(record)
        try:
            self._core.add_lora(request)
        except Exception as error:
            raise AdapterUnusable.because(record.name, str(error)) from error
        return self._note(record, request)

    def _request(self, record: AdapterRecord) -> LoRARequest:
        """Return what an adapter is to vLLM; what lies where a known one lay may be another version by now."""
        known = self._known.get(record.version)
        self._num_made += known is None
        number = self._num_made if known is None else known.lora_int_id
        return LoRARequest(record.version, number, str(record.path))

    def _note(self, record: AdapterRecord, request: LoRARequest) -> AdapterCard:
        assert record.weights is not None, "there is no reason against it"
        self._known[record.version] = request
        self._files[record.version] = WeightsFile(record.weights, record.weights_digest)
        return record.card()

    def _forget(self, versions: frozenset[str]) -> frozenset[str]:
        gone = (versions & self._known.keys()) - self.used()
        for version in gone:
            self._core.remove_lora(self._known.pop(version).lora_int_id)
            self._files.pop(version, None)
        return gone

    def _in_turn(self, call: Callable[[], Answer], *, after: Future[str | None] | None = None) -> Future[Answer]:
        """Have the engine's thread make a call before its next step, and answer with what it gave or raised.

        after: what is to end first; None is nothing
        """
        answer: Future[Answer] = Future()

        def carry_out() -> None:
            try:
                try:
                    found = call()
                finally:
                    self.look()  # also a call that fails may have made room
                answer.set_result(found)
            except Exception as error:
                answer.set_exception(error)

        if after is None:
            self.post(carry_out)
        else:
            after.add_done_callback(lambda _: self.post(carry_out))
        return answer
