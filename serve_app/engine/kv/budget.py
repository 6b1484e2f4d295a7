"""Sizes the KV cache: the configured bytes, or a share of the free memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.text_part import ModelNotSupported
from serve_app.engine.kv.storage import KeyValueShape

AUTO = "auto"
CPU_SHARE = 0.25
"""Of the memory that is free once the weights are there: other replicas of the node want theirs too."""
CUDA_SHARE = 0.85
"""Of the GPU's memory that is free then; the rest is for activations and logits."""
UNKNOWN_BYTES = 8 << 30
"""Taken for free where nothing says what is."""
STEP_BYTES = 256 << 20
"""What steps take beside weights, keys, values and logits: activations, kernels, what lies in the heap. On CPUs it is
a third of the 650 MB that a replica takes so; the rest are libraries, which are there when this is asked."""
PROCESS_BYTES = 400_000_000
"""What those libraries take, with what of a vocabulary constraints need."""
UNSEEN_PART = 8
"""Of the free memory, adapters that come later may take one part of so many."""
MIB = 1 << 20


def kv_budget(
    config: EngineConfig,
    shape: KeyValueShape,
    *,
    own_limit: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Return the bytes for keys and values, of one shard if the model is divided. Call it with weights loaded.

    own_limit: the model's own context, in tokens

    Raises ModelNotSupported where the bytes asked for are not free beside what steps take, or do not hold one block.
    """
    count = config.tensor_parallel
    free = free_bytes(device) // (count if device.type == "cpu" else 1)  # shards share a host's memory
    block_bytes = shape.bytes_per_token(dtype) * config.block_size
    if config.kv_cache_bytes == AUTO:
        share = CUDA_SHARE if device.type == "cuda" else CPU_SHARE
        usable = config.max_num_sequences * (config.max_model_len or own_limit)
        blocks = -(-usable // config.block_size)
        budget = min(int(free * share), blocks * block_bytes)
    else:
        budget = int(config.kv_cache_bytes) // count
    _check_free(config, budget, free=free, vocab_size=vocab_size)
    if budget < block_bytes:
        raise ModelNotSupported(
            f"kv_cache_bytes={config.kv_cache_bytes} gives {budget} bytes, but one block of {config.block_size} tokens"
            f" takes {block_bytes}. Raise kv_cache_bytes, or lower block_size."
        )
    return budget


def bytes_of_steps(config: EngineConfig, vocab_size: int) -> int:
    """Return what steps take beside weights, keys and values, with float32 logits of as many rows as can be."""
    return STEP_BYTES + (config.num_places + config.max_logit_rows) * vocab_size * torch.float32.itemsize


def check_adapters_fit(
    config: EngineConfig, sizes: Iterable[int], *, budget: int, vocab_size: int, device: torch.device
) -> None:
    """Refuse bytes asked for keys and values that leave no room for as many adapters as may be resident.

    sizes:  bytes of each adapter that there is
    budget: of keys and values, of which none are there yet

    Raises ModelNotSupported.
    """
    resident = sorted(sizes)[-config.max_adapters :]
    asked = config.adapter_bytes
    reserved = asked // config.tensor_parallel if isinstance(asked, int) else None
    _check_free(config, budget, free=free_bytes(device), vocab_size=vocab_size, adapters=resident, reserved=reserved)


def _check_free(
    config: EngineConfig,
    budget: int,
    *,
    free: int,
    vocab_size: int,
    adapters: Sequence[int] = (),
    reserved: int | None = None,
) -> None:
    """Refuse bytes that were asked for and are not free beside what steps and adapters take.

    adapters: bytes of each resident one;  reserved: what `adapter_bytes` asks for them together; None is their sum
    """
    steps, of_adapters = bytes_of_steps(config, vocab_size), sum(adapters) if reserved is None else reserved
    if config.kv_cache_bytes != AUTO and budget + steps + of_adapters > free:
        taken, remedy = ", logits among it", "Lower it"
        if of_adapters:
            taken = f" and {len(adapters)} adapters {of_adapters // MIB} MiB"
            remedy = f"Lower it or {'max_adapters' if reserved is None else 'adapter_bytes'}"
        raise ModelNotSupported(
            f"kv_cache_bytes={budget} ({budget // MIB} MiB) does not fit: {free // MIB} MiB of memory are free beside"
            f" the weights, of which steps take {steps // MIB} MiB{taken}. {remedy}, or leave it {AUTO!r}."
        )


def adapter_budget(config: EngineConfig, sizes: Iterable[int], *, usual: int, device: torch.device) -> int:
    """Bytes that resident adapters may take together, of one shard where the model is divided.

    sizes: bytes of each adapter that there is at start;  usual: bytes of one that may come later
    """
    if isinstance(config.adapter_bytes, int):
        return config.adapter_bytes // config.tensor_parallel
    unseen = min(usual * config.max_adapters, free_bytes(device) // UNSEEN_PART)
    return max(max(sizes, default=0) * config.max_adapters, unseen)


def context_within(config: EngineConfig, budget: int, *, own_limit: int, bytes_per_token: int) -> int:
    """Return the longest context, in tokens, that the model, the configuration and the budget allow.

    A context that was asked for is given or refused; the model's own is shortened to what the budget holds. Raises
    ModelNotSupported.
    """
    in_budget = budget // (bytes_per_token * config.block_size) * config.block_size
    wanted = min(config.max_model_len or own_limit, own_limit)
    if config.max_model_len is not None and wanted > in_budget:
        raise ModelNotSupported(
            f"max_model_len={wanted} does not fit: a sequence of that length takes"
            f" {wanted * bytes_per_token // MIB} MiB of keys and values, kv_cache_bytes is {budget // MIB} MiB, which"
            f" holds {in_budget} tokens. Lower max_model_len, or raise kv_cache_bytes."
        )
    return min(wanted, in_budget)


def check_weights_fit(num_bytes: int, *, device: torch.device) -> None:
    """Refuse weights that take more memory than is free. Raises ModelNotSupported."""
    free = free_bytes(device)
    if num_bytes > free:
        raise ModelNotSupported(
            f"the weights take {num_bytes // MIB} MiB, {free // MIB} MiB of memory are free. Set `weights: int8`, or"
            " serve a smaller model."
        )


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process may still take on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = free_host_bytes()
    return UNKNOWN_BYTES if free is None else free


ROOT = Path("/")


def free_host_bytes(root: Path = ROOT) -> int | None:
    """Return the least that the machine and every cgroup above the process leave; None off Linux.

    root: where proc and sys are
    """
    return min([*_free_of_the_machine(root), *_free_of_cgroups(root)], default=None)


def _free_of_the_machine(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _free_of_cgroups(root: Path) -> Iterator[int]:
    """Return what each limit above this process leaves, in cgroups v2, then v1; the page cache counts as free."""
    groups = root / "sys/fs/cgroup"
    own = groups / _own_cgroup(root)
    for folder in (own, *own.parents):
        if folder.is_relative_to(groups):
            yield from _free_of(folder, "memory.max", "memory.current", "inactive_file")
    yield from _free_of(groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _own_cgroup(root: Path) -> str:
    lines = _text(root / "proc/self/cgroup").splitlines()
    return next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")


def _free_of(folder: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    maximum, used = _text(folder / limit).strip(), _text(folder / usage).strip()
    if maximum.isdecimal() and used.isdecimal():
        lines = _text(folder / "memory.stat").splitlines()
        cached = next((int(line.split()[1]) for line in lines if line.startswith(f"{cache} ")), 0)
        yield max(0, int(maximum) - int(used) + cached)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
