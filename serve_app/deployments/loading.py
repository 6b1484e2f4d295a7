"""From a model's arguments to the service that computes it."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.catalog.adapters import read_records
from serve_app.catalog.defaults import DefaultSampling, chat_templates_of, read_default_sampling, read_embedding_form
from serve_app.catalog.models import locate_model, read_model_folder
from serve_app.catalog.published import PublishedFiles
from serve_app.core.cards import AdapterRecord, ToolPrompt
from serve_app.core.request import EmbeddingForm
from serve_app.deployments.arguments import ModelArgs
from serve_app.deployments.logs import log_as_configured

if TYPE_CHECKING:
    from serve_app.engine.config import EngineConfig
    from serve_app.replica.service import ModelService
    from serve_app.replica.tokenizer_pools import TokenizerPools

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # idle threads of torch sleep, they do not spin
    "HF_HUB_OFFLINE": "1",
}
"""Read once, when torch and transformers are imported. In the cluster file it would cost a process of its own: Ray has
idle ones at hand, but starts one anew where a `runtime_env` asks for it."""
AWAKE = {"own": "10000", "vllm": "300000"}
"""`GOMP_SPINCOUNT`: they spin between two parts of a step, about half a millisecond; vLLM's, whose parts are further
apart, some 15, as libgomp's do by itself. `kernels/openmp.py` says when they do not."""
MOST_CPUS = 64
"""With more, threads only sleep: to have them sleep at times takes a thread for each CPU."""


def load_service(args: ModelArgs, replica_id: str) -> ModelService:
    """Load the model and every adapter that fits it; blocks. The service is not started yet.

    Raises CatalogError for a folder that must not be loaded, and what loading itself raises.
    """
    awake = {"GOMP_SPINCOUNT": AWAKE[args.engine]} if (os.cpu_count() or 1) <= MOST_CPUS else {}
    for name, value in (ENVIRONMENT | awake).items():
        os.environ.setdefault(name, value)
    log_as_configured()
    folder = read_model_folder(locate_model(args.path))
    templates = chat_templates_of(folder.path, args.chat_template)
    default_sampling = default_sampling_of(args, folder.path)
    for sentence in default_sampling.unheard:
        logger.warning("%s: %s", args.name, sentence)
    adapters_folder = args.adapters_folder
    adapters = () if adapters_folder is None else read_records(adapters_folder)
    return load_replica(
        engine_config(args, folder.path),
        adapters,
        replica_id=replica_id,
        root=args.path,
        created=folder.created,
        adapters_root="" if adapters_folder is None else str(adapters_folder.resolve()),
        watches_adapters=args.watches_adapters,
        dialect=args.dialect,
        chat_template=templates.default,
        tool_template=templates.tool_use,
        tool_prompt=tool_prompt_of(args),
        tool_parser=args.tool_parser,
        default_sampling=default_sampling.values,
        reasoning_parser=args.reasoning_parser,
        embedding=embedding_form_of(args, folder.path),
    )


def load_replica(
    config: EngineConfig,
    adapters: Sequence[AdapterRecord] = (),
    *,
    replica_id: str,
    root: str | None = None,
    embedding: EmbeddingForm | None = None,
    clock: Callable[[], float] = time.monotonic,
    pools: TokenizerPools | None = None,
    **told: Any,
) -> ModelService:
    """Load a model into our engine, and put a replica's service before it; blocks. Call `start` on its event loop.

    adapters: as found on disk; one that does not fit is kept with its reason and stops nothing
    root:     what clients are told of where the weights came from; None is the folder
    embedding: how it embeds texts, for its card
    told:     further members of the card; `tool_prompt` counts where the template shows no tools

    Raises ModelNotSupported.
    """
    from serve_app.engine.driver import ReplicaEngine  # imported here, so that a router needs no torch
    from serve_app.replica.service import ModelService

    kind: Any = ReplicaEngine
    if config.engine == "vllm":
        from serve_app.backends.vllm.engine import VllmEngine as kind
    engine, tokenizer = kind.load_model(config, adapters)
    records = replace(engine.card.records, embedding=embedding)
    members = {"root": root or config.path, "records": records, "tool_prompt": "prompt", **told}
    card = replace(engine.card, **members)
    return ModelService(
        engine, tokenizer, card, replica_id=replica_id, clock=clock, pools=pools, adapter_files=PublishedFiles()
    )


def default_sampling_of(args: ModelArgs, folder: Path) -> DefaultSampling:
    """Return the sampling parameters for requests that leave them out. folder: the model's"""
    return read_default_sampling(folder) if args.default_sampling == "model" else DefaultSampling()


def tool_prompt_of(args: ModelArgs) -> ToolPrompt:
    """Return what to do with tools that the model's template does not show.

    If the form of its calls is known, "auto" leaves them out: the model was trained without our default text.
    """
    if args.tools_without_template == "auto":
        return "prompt" if args.tool_parser is None else "ignore"
    return args.tools_without_template


def embedding_form_of(args: ModelArgs, folder: Path) -> EmbeddingForm | None:
    """Return how the model embeds texts; None if it does not. folder: the model's"""
    if args.pooling is None:
        return None
    return read_embedding_form(folder) if args.pooling == "auto" else EmbeddingForm(pooling=args.pooling)


def engine_config(args: ModelArgs, folder: Path) -> EngineConfig:
    """Return the arguments that are the engine's. folder: the model's"""
    from serve_app.engine.config import EngineConfig

    settings = args.model_dump(include={field.name for field in fields(EngineConfig)})
    return EngineConfig(**settings | {"path": str(folder)})


def exempt_what_is_loaded() -> None:
    """Exempt every object that exists now from garbage collection, until the process ends.

    Libraries, model and tokenizer are some 400 000 objects. A collection of all of them stops every thread for a third
    of a second, and Python repeats it whenever a quarter as many new objects have become old.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def resting() -> Iterator[None]:
    """Switch garbage collection off inside, in every thread. Loading makes many objects and drops few in cycles.

    Otherwise Python collects a dozen times while libraries, model and tokenizer grow, which takes a tenth of the time
    that importing them takes.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
