"""What vLLM is told of a model: our settings in its names, and the model's own `vllm: {…}` after them."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from sysconfig import get_path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from serve_app.core.cards import AdapterRecord
from serve_app.core.weight_files import weight_files
from serve_app.engine.config import EngineConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger(__name__)

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as the highest rank of adapters."""
LEAST_RANK = 16
OTHER = "whether our engine does (`engine: own`) is said by `serve_app models check PATH`"
OURS = frozenset(
    {
        "model",
        "runner",
        "skip_tokenizer_init",
        "logits_processors",
        "async_scheduling",
        "disable_log_stats",
        "enable_lora",
    }
)
"""What a cluster file cannot say: the replica depends on it."""
NOT_ON_CPUS = ("fully_sharded_loras", "enable_tower_connector_lora")
"""Options of adapters that our kernels for CPUs do not carry out."""
OWN_ALONE = frozenset(
    {
        "weights", "tensor_parallel", "max_logit_rows", "kernels", "graphs", "run_ahead", "block_size",
        "adapter_bytes", "max_step_stretch", "min_prompt_tokens", "max_bypass_s", "swap_weight", "max_forced_tokens",
        "speculation", "max_draft_tokens", "return_hidden_states", "return_routed_experts", "max_recorded_bytes",
        "image_cache_bytes", "max_image_pixels", "max_waiting_image_bytes",
    }
)  # fmt: skip
"""Settings of a model that our engine alone carries out."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # logits processors are of the first one
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several replicas share a machine
    "HF_HUB_OFFLINE": "1",
}


def engine_arguments(config: EngineConfig, adapters: Iterable[AdapterRecord]) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs`, but for what is ours. Raises ModelNotSupported."""
    from serve_app.engine.decoder.text_part import ModelNotSupported  # imported here: it brings torch, which takes time

    for name, wrong in wrong_settings(config):
        raise ModelNotSupported(f"{name} {wrong}")
    arguments: dict[str, Any] = {
        "model": config.path,
        "runner": "generate",
        "dtype": config.dtype,
        "max_num_seqs": config.max_num_sequences,
        "max_num_batched_tokens": max(config.max_batch_tokens, config.max_num_sequences),
        "enable_prefix_caching": config.prefix_cache,
        "enable_chunked_prefill": True,
    }
    if config.max_model_len is not None:
        arguments["max_model_len"] = config.max_model_len
    if config.kv_cache_bytes != "auto":
        arguments["kv_cache_memory_bytes"] = config.kv_cache_bytes
    if config.max_adapters:
        arguments |= {
            "enable_lora": True,
            "max_loras": config.max_adapters,
            "max_lora_rank": highest_rank(adapters),
            "lora_target_modules": linear_names(Path(config.path)),
        }
    return arguments | dict(config.vllm or {})


def highest_rank(adapters: Iterable[AdapterRecord]) -> int:
    """Return the least rank that vLLM takes as the highest and these adapters fit below."""
    ranks = [rank for each in adapters if isinstance(rank := each.fields.get("r"), int)]
    wanted = max([LEAST_RANK, *ranks])
    return next((rank for rank in RANKS if rank >= wanted), RANKS[-1])


def linear_names(folder: Path) -> list[str]:
    """Return the names of the linears that adapters may change: all but the last one.

    Where vLLM wraps the last one, too, prompts cannot be scored beside adapters on CPUs.
    """
    found = set()
    for path in weight_files(folder):
        with safe_open(path, framework="numpy") as tensors:
            names = [name for name in tensors.keys() if name.endswith(".weight")]  # noqa: SIM118
            found |= {name.split(".")[-2] for name in names if len(tensors.get_slice(name).get_shape()) == 2}
    return sorted(name for name in found if name != "lm_head" and "emb" not in name and not name.startswith("wt"))


def wrong_settings(settings: EngineConfig) -> Iterator[tuple[str, str]]:
    """Yield each setting of a model that vLLM would leave out, and what is wrong with it."""
    for each in fields(EngineConfig):
        found = getattr(settings, each.name)
        if each.name in OWN_ALONE and found != each.default:
            yield each.name, f"must be left out, as only `engine: own` carries it out; found {found}"
    yield from (("vllm", wrong) for wrong in wrong_options(settings.vllm or {}))


def wrong_options(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a model's `vllm: {…}`; which names there are is known where vLLM is installed."""
    if ours := sorted(OURS & options.keys()):
        yield f"must leave out what serve_app sets itself; found {', '.join(ours)}"
    if find_spec("vllm") is None:
        return
    from vllm.engine.arg_utils import EngineArgs

    if unknown := sorted(options.keys() - OURS - EngineArgs.__dataclass_fields__.keys()):
        yield f"must have options of vLLM's EngineArgs; found {', '.join(unknown)}"


def outlook(folder: Path) -> tuple[bool | None, str]:
    """Say whether vLLM has a model's architecture, and why; None where it is not installed in this Python."""
    named = json.loads((folder / "config.json").read_bytes()).get("architectures") or []
    if find_spec("vllm") is None:
        return None, "vLLM is not installed in this Python; where it is, the same command asks it"
    from vllm.model_executor.models import ModelRegistry

    if known := sorted(set(named) & set(ModelRegistry.get_supported_archs())):
        return True, f"vLLM has {', '.join(known)}; it judges sizes and formats when it loads the model"
    return False, f"vLLM has no class for {', '.join(map(str, named)) or 'a folder without architectures'}"


def vllm_config(arguments: Mapping[str, Any], processors: list[Any]) -> VllmConfig:
    """Have vLLM check the arguments. Raises ModelNotSupported, with what vLLM says."""
    from serve_app.engine.decoder.text_part import ModelNotSupported  # imported here: it brings torch, which takes time

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm.engine.arg_utils import EngineArgs

    try:
        made = EngineArgs(
            **arguments,
            skip_tokenizer_init=True,
            logits_processors=processors,
            async_scheduling=False,
            disable_log_stats=True,
        )
        found = made.create_engine_config()
        return on_cpus(made, found) if found.device_config.device_type == "cpu" else found
    except (TypeError, ValueError) as error:
        raise ModelNotSupported(f"vLLM does not take this model as it is configured: {error}; {OTHER}") from error


def on_cpus(made: EngineArgs, found: VllmConfig) -> VllmConfig:
    """Return what to load on CPUs: compiled where that can be, and with our kernels for adapters.

    vLLM compiles nothing where it knows of adapters, and computes norms and gates in torch's plain operations then. So
    vLLM makes the configuration without them, and they are added to it. Raises ValueError for options of theirs that
    our kernels do not know.
    """
    for name in NOT_ON_CPUS if found.lora_config is not None else ():
        if getattr(made, name, False):
            raise ValueError(f"{name} must be left out on CPUs, where our kernels compute adapters; found true")
    os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")  # vLLM 0.32 fails to read its own files of it on CPUs
    can_compile = shutil.which(os.environ.get("CXX", "g++")) and (Path(get_path("include")) / "Python.h").exists()
    if not can_compile and not made.enforce_eager:
        logger.warning("steps are slower, as vLLM cannot compile them: install g++ (or set CXX) and Python's headers")
    elif found.lora_config is None:
        return found
    bare = replace(made, enable_lora=False, enforce_eager=made.enforce_eager or not can_compile).create_engine_config()
    if found.lora_config is not None:
        bare.lora_config = found.lora_config
        bare.parallel_config.worker_cls = f"{__package__}.adapter_rows.AdapterWorker"
    return bare
