"""Finds which weights an adapter's configuration names: plain ones by their names, all others by asking PEFT."""

from __future__ import annotations

import inspect
import json
import math
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from serve_app.core.weight_files import weight_files
from serve_app.engine.decoder.config_check import check_config, shapes_of


class AdapterRefused(ValueError):
    """The adapter does not fit the model or needs what the engine does not carry out; the message says what."""


T = TypeVar("T")

PREFIX = "base_model.model."
MAX_RANK = 512
MAX_ALPHA = 1e6
MAX_KEYS = 4096
MATCHING_S = 10.0
MERGE = "merge it into its base (PEFT's merge_and_unload, then save_pretrained) and serve that folder as a model"

MATRICES = frozenset({"gate_up_proj", "up_proj", "down_proj"})
"""What transformers calls the parameters of experts that it can call in several ways."""

_NAME = "default"
_READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"}
"""Fields whose meaning is computed here: PEFT looks up each pattern for each module, compiled anew beyond 512 keys."""
_MAKING = {
    "base_model_name_or_path", "bias", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
"""Fields of PEFT's that say how an adapter was made, or what its tensors show as well."""
_PLAIN = {"r", "lora_alpha", "use_rslora", "use_dora", "init_lora_weights", "target_modules"}
"""Fields of a configuration that can be matched without PEFT."""
_REFUSED: Mapping[str, str] = {
    "layer_replication": f"it repeats layers of the base; {MERGE}",
    "lora_bias": f"lora_B has biases; {MERGE}, or train it again without lora_bias",
    "trainable_token_indices": f"it replaces rows of the embedding; {MERGE}, or train it again without",
    "use_qalora": f"its inputs are pooled as GPTQ groups them; {MERGE}",
}
_QUANTIFIED = re.compile(r"[*+?{]")
_TRIAL = r"""
import json, re, sys
expressions, names = json.load(sys.stdin)
for each in expressions:
    forms = each, rf"(.*\.)?({each})$", rf"(?:^|.*?\.){each}\.(?P<idx>\d+)\.", rf"(^|.*\.){each}($|\..*)"
    for form in map(re.compile, forms):
        for name in names:
            form.fullmatch(name), form.match(name)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A weight that PEFT adapts.

    module, parameter: where it is; the parameter of a module that is no linear, else None
    stored:  what its tensors' names in a file begin with
    experts: how many matrices of [outputs, inputs] it is; None for one alone
    refusal: why adapters of it are not computed; None where they are
    """

    module: str
    parameter: str | None
    stored: str
    rank: int
    scaling: float
    outputs: int = 0
    inputs: int = 0
    experts: int | None = None
    refusal: str | None = None

    @property
    def name(self) -> str:
        return self.module if self.parameter is None else f"{self.module}.{self.parameter}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """targets: all that a configuration names;  notes: what of it changes nothing"""

    targets: tuple[Target, ...]
    use_dora: bool
    notes: tuple[str, ...]


class Matcher:
    """Matches configurations with one model. Each is matched once, however many adapters have it.

    shapes:   the model without its numbers
    converts: whether PEFT may give tensors and modules of an adapter other names, as the model's family had others
    """

    def __init__(self, shapes: nn.Module, folder: Path, *, sees: bool = False) -> None:
        """shapes: the model without its numbers;  folder: where these are;  sees: whether images are served"""
        self.sees = sees
        self.shapes = shapes
        self.folder = folder
        self._found: dict[str, Matched | AdapterRefused] = {}
        self._inside = text_modules(shapes)
        self._weights = {name: id(each) for name, each in shapes.named_parameters(remove_duplicate=False)}
        self.converts = _converts(shapes)

    @classmethod
    def of(cls, model: PreTrainedModel, *, sees: bool = False) -> Matcher:
        """Match with the folder that a model was loaded from, or that its shapes are of."""
        return cls.of_folder(Path(model.config.name_or_path), sees=sees)

    @classmethod
    def of_folder(cls, folder: Path, *, sees: bool = False) -> Matcher:
        """Match with the model in a folder, whose weights are not read."""
        shapes: Any = shapes_of(check_config(folder, with_images=sees))
        shapes.tie_weights()
        return cls(shapes, folder, sees=sees)

    def match(self, config: Mapping[str, Any]) -> Matched:
        """Say what an adapter_config.json names in this model. Raises AdapterRefused."""
        key = _key(config)
        if key not in self._found:
            try:
                self._found[key] = self._plain(config) or self._match(config)
            except AdapterRefused as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, AdapterRefused):
            raise found
        return found

    def knows(self, config: Mapping[str, Any]) -> bool:
        """Return whether `match` takes no time: the configuration was matched before, or is plain."""
        try:
            return _key(config) in self._found or self._plain(config) is not None
        except AdapterRefused:
            return True

    def learn(self, config: Mapping[str, Any], found: Matched | AdapterRefused) -> None:
        """Take over what another process has matched."""
        self._found[_key(config)] = found

    def is_inside(self, module: str) -> bool:
        """Whether a module is the decoder's or the head, and so part of what computes text."""
        return module in self._inside

    def base_weight(self, name: str) -> Any:
        """Give a slice of the checkpoint's file for a weight of this name; None where there is none.

        Tied weights are one. Raises KeyError where the model has no such weight.
        """
        wanted = self._weights[name]
        names = {each for each, number in self._weights.items() if number == wanted}
        for file in weight_files(self.folder):
            handle = safe_open(file, framework="pt")  # slices keep it open
            for each in names & set(handle.keys()):
                return handle.get_slice(each)
        return None

    def __contains__(self, weight: str) -> bool:
        return weight in self._weights

    def _plain(self, config: Mapping[str, Any]) -> Matched | None:
        """As `_match`, of what names nothing but linears by the ends of their names, for one rank; None for the rest.

        PEFT need not be imported for it, which takes seconds.
        """
        wanted, others = config.get("target_modules"), config.keys() - _MAKING - _PLAIN
        are_names = isinstance(wanted, list) and all(isinstance(each, str) for each in wanted)
        ends: set[str] = set(wanted or ()) if are_names else set()
        is_said = any(config[name] or type(config[name]) in (int, float) for name in others)  # 0 is a layer
        is_one = {"r", "lora_alpha"} <= config.keys() and not is_said
        if self.converts or not is_one or config.get("init_lora_weights", True) is not True:
            return None
        found = {name: each for name, each in self.shapes.named_modules() if not ends.isdisjoint(_ends(name))}
        is_plain = head_name(self.shapes) not in found and all(type(each) is nn.Linear for each in found.values())
        if not is_plain or not ends or ends != {end for name in found for end in _ends(name)} & ends:
            return None
        rank, alpha = _rank("r", config["r"]), _alpha("lora_alpha", config["lora_alpha"])
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        targets = [
            Target(
                module=name, parameter=None, stored=PREFIX + name, rank=rank, scaling=scaling,
                outputs=each.out_features, inputs=each.in_features,
            )
            for name, each in found.items()
        ]  # fmt: skip
        return Matched(targets=tuple(targets), use_dora=bool(config.get("use_dora")), notes=())

    def _match(self, config: Mapping[str, Any]) -> Matched:
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel

        known = {each.name: each for each in fields(LoraConfig)}
        for name in config.keys() & known.keys():
            if config[name] and name in _REFUSED:
                raise _refused(name, _REFUSED[name])
            if config[name] and known[name].metadata.get("is_lora_variant") and name != "use_dora":
                raise _refused(name, f"PEFT computes it in another way than LoRA; {MERGE}, or train plain LoRA")
        rank = _rank("r", config.get("r", LoraConfig.r))
        alpha = _alpha("lora_alpha", config.get("lora_alpha", LoraConfig.lora_alpha))
        ranks, alphas = _pattern(config, "rank_pattern", _rank), _pattern(config, "alpha_pattern", _alpha)
        self._try_expressions([*_expressions(config), *ranks, *alphas])
        _check_init(config.get("init_lora_weights", True))
        shapes = deepcopy(self.shapes)
        given = {name: config[name] for name in config.keys() & known.keys() - _MAKING - _READ}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT has opinions on how adapters are made
            try:
                peft = LoraConfig(**given, r=rank, lora_alpha=alpha, init_lora_weights=False)
                LoraModel(shapes, peft, _NAME, low_cpu_mem_usage=True)
            except Exception as error:  # whatever PEFT finds wrong with it
                said = str(error)[:500].rstrip(".")
                raise AdapterRefused(
                    f"adapter_config.json: PEFT refuses it: {said}. Serve it with the base that it was trained on, or"
                    f" {MERGE}"
                ) from error
        ranks |= peft.rank_pattern or {}  # what was fused has the ranks of its parts
        alphas |= peft.alpha_pattern or {}

        def target(path: str, layer: Any) -> Target:
            found = _target(path, layer)
            own_rank, own_alpha = _lookup(ranks, found["key"], rank), _lookup(alphas, found.pop("key"), alpha)
            scaling = own_alpha / (math.sqrt(own_rank) if config.get("use_rslora") else own_rank)
            return Target(**found, rank=own_rank, scaling=scaling)

        layers = [(path, each) for path, each in shapes.named_modules() if hasattr(each, "lora_A")]
        unknown = sorted(name for name in config.keys() - known.keys() - _MAKING if config[name])
        notes = [f"adapter_config.json: {name} is not read by PEFT's LoRA" for name in unknown]
        return Matched(
            targets=tuple(target(path, each) for path, each in layers),
            use_dora=bool(config.get("use_dora")),
            notes=tuple(notes),
        )

    def _try_expressions(self, expressions: Sequence[str]) -> None:
        """See that matching ends, in a process that may be ended: some expressions take for ever on some names."""
        suspects = [each for each in dict.fromkeys(expressions) if _QUANTIFIED.search(each)]
        if not suspects:
            return
        names = [name for name, _ in self.shapes.named_modules()] + [*self._weights]
        command = [sys.executable, "-I", "-S", "-c", _TRIAL]
        try:
            done = subprocess.run(
                command, input=json.dumps([suspects, names]).encode(), capture_output=True, timeout=MATCHING_S
            )
        except subprocess.TimeoutExpired:
            told = ", ".join(repr(each[:80]) for each in suspects[:3])
            raise AdapterRefused(
                f"adapter_config.json: matching its expressions takes more than {MATCHING_S:g} s ({told});"
                " write them without repeats inside repeats, or name the modules"
            ) from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise AdapterRefused(f"adapter_config.json: it has an expression that is none, mend it: {said}")


def _ends(name: str) -> list[str]:
    """Return what a name in a list of PEFT's may be for this module: its own, whole or from a dot on."""
    parts = name.split(".")
    return [".".join(parts[begin:]) for begin in range(len(parts))]


def _converts(model: nn.Module) -> bool:
    """As PEFT asks it."""
    config: Any = getattr(model, "config", None)
    return get_checkpoint_conversion_mapping(getattr(config, "model_type", None)) is not None


def _key(config: Mapping[str, Any]) -> str:
    return json.dumps({name: config[name] for name in config.keys() - _MAKING}, sort_keys=True)


def text_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Give the modules that compute text, by name: the decoder's and the output head; of a plain module, all."""
    found = dict(model.named_modules())
    if not isinstance(model, PreTrainedModel):
        return found
    inside = {id(each) for each in model.get_decoder().modules()} | {id(model.get_output_embeddings())}
    return {name: each for name, each in found.items() if id(each) in inside}


def head_name(model: nn.Module) -> str:
    """Give the name of the output head; "" where there is none."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return next((name for name, module in model.named_modules() if module is head), "")


def converted(model: nn.Module, tensors: Mapping[str, Tensor], *, is_older: bool) -> dict[str, Tensor]:
    """Give an adapter's tensors the names and layouts that PEFT gives them for this model.

    is_older: give them the names that transformers gives a checkpoint's instead; PEFT does so for some families alone

    Raises AdapterRefused.
    """
    if is_older and isinstance(model, PreTrainedModel):
        known = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
        names = {name: rename_source_key(name.removeprefix(PREFIX), known, [])[0] for name in tensors}
        return {PREFIX + names[name]: each for name, each in tensors.items()}
    if not _converts(model):
        return dict(tensors)
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    try:
        found = convert_peft_adapter_state_dict_for_transformers(model, LoraConfig(), dict(tensors), _NAME)
    except Exception as error:  # whatever PEFT cannot convert
        raise AdapterRefused(f"PEFT cannot convert its tensors for this model: {str(error)[:500]}; {MERGE}") from error
    return {str(name): each for name, each in found.items()}


def _check_init(init: Any) -> None:
    """Refuse adapters that are right together with another base alone: PEFT is asked what an initialisation changes."""
    if isinstance(init, bool):
        return
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    linear = nn.Linear(8, 8)
    weight = linear.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = LoraConfig(target_modules=["0"], r=2, init_lora_weights=init)
            layer: Any = LoraModel(nn.Sequential(linear), config, _NAME).model[0]
            is_kept = not layer.lora_variant and weight.equal(layer.base_layer.weight)
        except Exception:  # it asks for data, or is none of PEFT's
            is_kept = False
    if not is_kept:
        raise _refused(
            "init_lora_weights",
            f"{str(init)[:80]!r} changes the base model; save the adapter again as plain LoRA"
            " (path_initial_model_for_weight_conversion of save_pretrained), or " + MERGE,
        )


def _target(path: str, layer: Any) -> dict[str, Any]:
    """The facts of a layer of PEFT's. key: what patterns are matched with"""
    from peft.tuners.lora.layer import Linear, ParamWrapper

    base, module = layer.get_base_layer(), path.replace(".base_layer", "")
    found = {"module": module, "parameter": None, "stored": PREFIX + path, "key": module}
    if isinstance(layer, Linear) and _is_linear(base):
        return found | {"outputs": layer.out_features, "inputs": layer.in_features}
    if not isinstance(layer, ParamWrapper):
        what = "an embedding" if isinstance(base, nn.Embedding) else f"a {type(base).__name__}"
        return found | {"refusal": f"it is LoRA of {what}; train it again without, or {MERGE}"}
    found |= {"key": f"{module}.{layer.parameter_name}", "outputs": layer.out_features, "inputs": layer.in_features}
    if isinstance(base, nn.Linear) and _is_linear(base) and layer.parameter_name == "weight":
        return found
    is_stack = layer.get_param().ndim == 3
    found |= {"parameter": layer.parameter_name, "experts": layer.num_experts if is_stack else None}
    is_computed = layer.parameter_name in MATRICES and hasattr(base, "is_transposed") if is_stack else _is_router(base)
    if not is_computed:
        found["refusal"] = f"it is LoRA of a parameter of a {type(base).__name__}; {MERGE}"
    return found


def _is_linear(module: nn.Module) -> bool:
    """Whether it makes a row of a row; some families' routers are linears that give more than that."""
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


def _is_router(module: nn.Module) -> bool:
    """Whether all that a module makes of a token follows from the token alone, through its weight and fixed biases."""
    _, *others = inspect.signature(module.forward).parameters
    return all("bias" in name for name in others) and not isinstance(module, nn.Embedding | Conv1D)


def _expressions(config: Mapping[str, Any]) -> list[str]:
    """What PEFT reads as expressions: a list of targets or exclusions are names."""
    found: list[str] = []
    for name in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save"):
        value = config.get(name)
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, list) and name in {"layers_pattern", "modules_to_save"}:
            found += [each for each in value if isinstance(each, str)]
    return found


def _pattern(config: Mapping[str, Any], name: str, check: Callable[[str, Any], T]) -> dict[str, T]:
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict) or len(pattern) > MAX_KEYS:
        raise _refused(name, f"it must be an object of at most {MAX_KEYS} names of modules")
    return {key: check(f"{name}[{key!r}]", value) for key, value in pattern.items()}


def _rank(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise _refused(name, f"it must be a whole number from 1 to {MAX_RANK}, found {str(value)[:80]!r}; {MERGE}")
    return value


def _alpha(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < MAX_ALPHA:
        raise _refused(name, f"it must be a number of less than {MAX_ALPHA:g}, found {str(value)[:80]!r}")
    return float(value)


def _refused(name: str, why: str) -> AdapterRefused:
    return AdapterRefused(f"adapter_config.json: {name}: {why}")


@lru_cache(maxsize=2 * MAX_KEYS)
def _compiled(key: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({key})$")


def _lookup(pattern: Mapping[str, T], module: str, default: T) -> T:
    """Find the first key that matches the end of the module's name, as PEFT's `get_pattern_key` does."""
    return next((value for key, value in pattern.items() if _compiled(key).match(module)), default)
