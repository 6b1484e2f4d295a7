"""Loads a base model from its folder for packed batches, or refuses it and names the reason."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as library_logging

from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.classifier import Head, read_head
from serve_app.engine.decoder.config_check import (
    CheckedConfig,
    check_config,
    choose_dtype,
    ends_of_generation,
    token_ids,
    weight_bytes,
    weight_bytes_on_cpu,
)
from serve_app.engine.decoder.layout import BackgroundDowncast
from serve_app.engine.decoder.loop import Scorings
from serve_app.engine.decoder.memory import give_back_freed_memory
from serve_app.engine.decoder.quantized_formats import as_plain, kept_in, open_slices, outlines
from serve_app.engine.decoder.quantized_linear import Bits
from serve_app.engine.decoder.self_test import ReferenceForward, check, outlined_shape, run_reference, settle
from serve_app.engine.decoder.stored import receiving, settle_weights, stored_dtype, storing
from serve_app.engine.decoder.text_part import ModelNotSupported, settle_longrope
from serve_app.engine.kv.budget import check_weights_fit, context_within, kv_budget
from serve_app.engine.kv.storage import KeyValueShape
from serve_app.engine.tensor_parallel.division import Division, divide, parts_of
from serve_app.engine.tensor_parallel.workers import Collectives, Peers, Shard, Workers, sum_outputs
from serve_app.engine.vision.support import VisionSupport
from serve_app.engine.vision.tower import VisionTower, take_tower
from serve_app.kernels.interface import Kernels, choose_kernels
from serve_app.text.detokenizer import UnsupportedTokenizer
from serve_app.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with what the engine has to know of it.

    kv_cache_bytes: what its keys and values may take; of a shard, its own
    eos_token_ids:  tokens that end a text
    downcast:      lays its weights out in 16 bits, once it serves
    scorings:       with which the loop computes it; None where transformers' modules do
    tower:          of a model that takes images; nothing of it is in `module`
    why_no_images:  why a model with a vision tower takes none here
    kernels:        who computes attention over pages, as it passed the probe
    shard:          which part of a divided model it is, and with whom; None where it is whole
    head:           its classification head; None if it has none
    """

    module: PreTrainedModel
    shape: KeyValueShape
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    kv_cache_bytes: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    downcast: BackgroundDowncast
    scorings: Scorings | None = None
    tower: VisionTower | None = None
    why_no_images: str | None = None
    kernels: Kernels = "torch"
    shard: Shard | None = None
    head: Head | None = None

    @property
    def uses_triton(self) -> bool:
        return self.kernels != "torch"

    @property
    def workers(self) -> Workers | None:
        """The processes that follow this one's steps."""
        return None if self.shard is None else self.shard.workers

    @property
    def sums(self) -> Collectives | None:
        return None if self.shard is None else self.shard.sums


def load_with_tokenizer(config: EngineConfig) -> tuple[LoadedModel, TextTokenizer]:
    """Read a folder's tokenizer, then its model, whose texts end at the tokenizer's own end too.

    Raises ModelNotSupported.
    """
    tokenizer = read_tokenizer(config, check_config(config.path, with_images=config.images))
    model = load_model(config)
    return replace(model, eos_token_ids=model.eos_token_ids | tokenizer.eos_token_ids), tokenizer


def load_model(config: EngineConfig, *, peers: Peers | None = None) -> LoadedModel:
    """Read the weights, and check that the engine's attention gives the model's own logits.

    peers: who compute the other shards of a model that is divided; None starts them where the configuration wants it

    Raises ModelNotSupported.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if peers is not None or config.tensor_parallel == 1:
        return _load(config, peers)
    divide(check_config(config.path, with_images=config.images), config.tensor_parallel, weights=config.weights)
    device = choose_device(config.device, count=config.tensor_parallel)
    workers = Workers(config.tensor_parallel, device, threads=config.threads)
    try:
        return load_with(workers, config)
    except BaseException:
        workers.close()
        raise


def load_with(workers: Workers, config: EngineConfig) -> LoadedModel:
    """Load a divided model together with these workers, in the place of what they had. Raises ModelNotSupported."""
    workers.load(config)
    try:
        return load_model(config, peers=workers)
    except (RuntimeError, ModelNotSupported) as error:  # it may be of a sum that nobody came to
        raise ModelNotSupported(workers.refusal() or str(error)) from error


def _load(config: EngineConfig, peers: Peers | None) -> LoadedModel:
    checked = check_config(config.path, with_images=config.images)
    device = choose_device(config.device) if peers is None else peers.sums.device
    dtype = choose_dtype(config.dtype, checked.dtype, device)
    if checked.dtype is not None and config.dtype == "auto" and dtype != checked.dtype:
        logger.warning("%s: %s instead of %s, which this CPU computes slowly", config.name, dtype, checked.dtype)
    if peers is None:
        module, shard = _read_whole(config, checked, dtype, device), None
    else:
        module, shard = _read_part(config, checked, dtype, peers)
    tower = take_tower(module, checked.vision, config) if isinstance(checked.vision, VisionSupport) else None
    reference = run_reference(module)
    sums = None if shard is None else shard.sums
    shape, scorings = reference.shape, settle(module, reference, sums=sums)
    kernels = _settle_kernels(module, reference, config)
    give_back_freed_memory()
    own_limit = checked.max_model_len
    vocab_size = int(checked.text.vocab_size)
    budget = kv_budget(config, shape, own_limit=own_limit, vocab_size=vocab_size, dtype=dtype, device=device)
    if sums is not None:
        budget = sums.least(budget)
    max_model_len = context_within(config, budget, own_limit=own_limit, bytes_per_token=shape.bytes_per_token(dtype))
    settle_longrope(module, max_model_len)
    if max_model_len < own_limit and config.max_model_len is None:
        logger.warning("%s: context of %d tokens instead of %d, for want of memory for keys and values", config.name,
                       max_model_len, own_limit)  # fmt: skip
    return LoadedModel(
        module=module,
        shape=shape,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        kv_cache_bytes=budget,
        vocab_size=vocab_size,
        eos_token_ids=read_eos_token_ids(checked, Path(config.path)),
        downcast=BackgroundDowncast(module),
        scorings=scorings,
        tower=tower if isinstance(tower, VisionTower) else None,
        why_no_images=next((each for each in (checked.vision, tower) if isinstance(each, str)), None),
        kernels=kernels,
        shard=shard,
        head=None if checked.head is None else read_head(checked.head, config.path),
    )


def read_tokenizer(config: EngineConfig, checked: CheckedConfig) -> TextTokenizer:
    """Read the tokenizer of a model's folder. Raises ModelNotSupported."""
    try:
        return TextTokenizer.load(Path(config.path), vocab_size=int(checked.text.vocab_size))
    except UnsupportedTokenizer as error:
        raise ModelNotSupported(f"{checked.config.model_type}: {error}") from error


def _read_whole(
    config: EngineConfig, checked: CheckedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    check_weights_fit(weight_bytes(checked, dtype, bits_of(config, device)), device=device)
    return read_module(config, checked, dtype).to(device).eval().requires_grad_(False)


def _read_part(
    config: EngineConfig, checked: CheckedConfig, dtype: torch.dtype, peers: Peers
) -> tuple[PreTrainedModel, Shard]:
    """Read this process's shard and wait for the others; from then on all shards sum what they compute."""
    device = peers.sums.device
    division = divide(checked, peers.count, number=peers.number, weights=config.weights)
    part = division.narrowed(checked)
    num_in_memory = peers.count if device.type == "cpu" else 1
    check_weights_fit(weight_bytes(part, dtype) * num_in_memory, device=device)
    module = read_module(config, part, dtype, division).to(device).eval().requires_grad_(False)
    peers.meet()
    sum_outputs(module.get_decoder(), peers.sums)
    return module, Shard(division=division, sums=peers.sums, workers=peers if isinstance(peers, Workers) else None)


def read_module(
    config: EngineConfig, checked: CheckedConfig, dtype: torch.dtype, division: Division | None = None
) -> PreTrainedModel:
    """Read the model with all of its weights, quantised ones as the numbers that they mean, or in few bits.

    division: of which the model is a part
    """
    weights: Any = open_slices(Path(config.path))
    kind, is_plain = checked.kind, division is None and checked.formats is None and config.weights is None
    if is_plain and dtype == torch.float32 and choose_device(config.device).type == "cpu":
        stored = stored_dtype(weights)
        kind = kind if stored is None else storing(kind, stored)
    if checked.formats is not None:
        weights = as_plain(weights, checked.formats)
    if division is not None:
        weights = parts_of(weights, division)
    if config.weights is not None:
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # else threads read ahead of what is rounded, up to all of it
        kind = receiving(kind, config.weights, kept_in(weights if checked.formats else {}, config.weights))
    loaded = _filled(kind, checked, weights, dtype)
    loaded.config.name_or_path = config.path  # which is forgotten where weights are handed over
    settle_weights(loaded)
    return loaded


def _filled(
    kind: type[PreTrainedModel], checked: CheckedConfig, weights: Any, dtype: torch.dtype, **settings: Any
) -> PreTrainedModel:
    """Have the library make a model and fill it. Raises ModelNotSupported if a weight lacks or has another shape."""
    module: PreTrainedModel
    module, found = kind.from_pretrained(
        None,
        state_dict=weights,
        config=checked.config,
        dtype=dtype,
        local_files_only=True,
        attn_implementation="eager",
        output_loading_info=True,
        **settings,
    )
    lacking = sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])])
    if lacking:
        named = ", ".join(lacking[:5]) + (" …" if len(lacking) > 5 else "")
        raise ModelNotSupported(
            f"{checked.config.model_type}: {len(lacking)} weights are not in the checkpoint: {named}"
        )
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What loading would find. num_bytes: of all weights;  notes: what files say without effect"""

    checked: CheckedConfig
    num_bytes: int
    notes: tuple[str, ...]


def rehearse(config: EngineConfig) -> Rehearsal:
    """Do what loading does, in its order, without the numbers of weights: files, tokenizer, shapes, attention, context.

    What memory is free is not asked. Raises ModelNotSupported, in the words of loading.
    """
    checked, count = check_config(config.path, with_images=config.images), config.tensor_parallel
    tokenizer = read_tokenizer(config, checked)
    division = divide(checked, count, weights=config.weights) if count > 1 else None
    part = checked if division is None else division.narrowed(checked)
    num_bytes = count * weight_bytes_on_cpu(part, config.dtype, config.weights)
    dtype = choose_dtype(config.dtype, checked.dtype, torch.device("cpu"))
    if checked.head is not None:
        read_head(checked.head, config.path)  # a few rows
    with _quiet_library():
        weights: Any = outlines(open_slices(Path(config.path)))
        weights = weights if checked.formats is None else as_plain(weights, checked.formats)
        shape = outlined_shape(_filled(checked.kind, checked, weights, torch.bfloat16, device_map="meta"))
    if shape is not None and isinstance(config.kv_cache_bytes, int):
        limits = {"own_limit": checked.max_model_len, "bytes_per_token": shape.bytes_per_token(dtype)}
        context_within(config, config.kv_cache_bytes, **limits)
    return Rehearsal(checked=checked, num_bytes=num_bytes, notes=(*checked.notes, *tokenizer.notes))


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Within it, the library shows no progress and reports nothing of weights that are not there."""
    level, shows = library_logging.get_verbosity(), library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(level)
        if shows:
            library_logging.enable_progress_bar()


def bits_of(config: EngineConfig, device: torch.device) -> Bits | None:
    """Return in how many bits weights are kept. Raises ModelNotSupported if there is no kernel for them."""
    if config.weights is not None and device.type != "cpu":
        raise ModelNotSupported(
            f"weights: {config.weights} is computed on CPUs alone, not on {device.type}; leave it out"
        )
    return config.weights


def _settle_kernels(module: PreTrainedModel, reference: ReferenceForward, config: EngineConfig) -> Kernels:
    """Return whose kernels serve: another's than torch's only if the model computes the same with them.

    Raises ModelNotSupported.
    """
    device = module.device
    for kernels in choose_kernels(config.kernels, device):
        if kernels == "torch":
            break
        try:
            check(module, reference, kernels=kernels)
        except Exception as error:  # compilers of kernels fail in ways of their own
            if config.kernels != "auto":
                raise ModelNotSupported(
                    f"kernels: {kernels} was asked for: {error}. Leave `kernels` out, and what there is serves."
                ) from error
            logger.warning(
                "%s: attention is not %s's, whose kernels did not pass the check: %s", config.name, kernels, error
            )
        else:
            return kernels
    return "torch"


def choose_device(name: str, *, count: int = 1) -> torch.device:
    """Return the device, of which there are `count` if it is a GPU. Raises ModelNotSupported."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelNotSupported("device: cuda was asked for, but torch sees no CUDA device")
    if name == "cuda" and torch.cuda.device_count() < count:
        raise ModelNotSupported(
            f"tensor_parallel: {count} wants {count} GPUs, this replica has {torch.cuda.device_count()}; give it"
            f" `num_gpus: {count}` in ray_actor_options"
        )
    return torch.device(name)


def read_eos_token_ids(checked: CheckedConfig, folder: Path) -> frozenset[int]:
    """Return the ids that end a text: all that config.json and generation_config.json name.

    Where neither names any, what the configuration's class has; ids beyond the vocabulary mean nothing.
    """
    found = ends_of_generation(folder) | checked.eos_token_ids
    found = found or token_ids(*(getattr(each, "eos_token_id", None) for each in (checked.config, checked.text)))
    return frozenset(each for each in found if 0 <= each < int(checked.text.vocab_size))
