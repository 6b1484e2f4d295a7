"""Decides from a model's configuration, before reading weights, whether it is served. Loading and checks use it."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from serve_app.core.request import HeadForm
from serve_app.engine.decoder.classifier import READ, class_under_head, head_form
from serve_app.engine.decoder.linears import cpu_is_fast
from serve_app.engine.decoder.quantized_formats import Format, formats_of
from serve_app.engine.decoder.quantized_linear import Bits
from serve_app.engine.decoder.stored import await_weights
from serve_app.engine.decoder.text_part import ModelNotSupported, class_named, text_class, text_config, whole_class
from serve_app.engine.decoder.transformers_private import from_config
from serve_app.engine.vision.support import VisionSupport, find_vision_support

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
# Settings by which the library would run code that it finds, fetch it, or compute in another way than the engine chose.
_REACHING_OUT = frozenset({
    "auto_map", "custom_pipelines", "attn_implementation", "experts_implementation", "fusion_config",
    "distributed_config", "transformers_weights",
})  # fmt: skip
_LISTS_OF_TENSORS = frozenset({"quantization_config", "compression_config"})  # never given to the library
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedConfig:
    """What a configuration says of a model that may be loaded.

    config:  the whole, without what it says of quantisation;  text: its part for text, or the same
    kind:    the class that completes text with it
    head:    how its classification head reads texts; None if it has none
    vision:  how it takes images, or why it does not here; None for a model of text
    formats: in which its weights are stored; None where they are plain
    max_model_len: its own context, in tokens
    eos_token_ids: tokens that end a text, as config.json says
    notes:   what config.json says that changes nothing here
    """

    config: PreTrainedConfig
    text: Any
    kind: type[PreTrainedModel]
    vision: VisionSupport | str | None
    formats: tuple[Format, ...] | None
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    head: HeadForm | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """The numbers that its author means it to be computed in; None where nothing says so."""
        own: torch.dtype | None = self.config.dtype or self.text.dtype
        return own


def check_config(path: str | Path, *, with_images: bool = True) -> CheckedConfig:
    """Read a folder's config.json. The probe has the last word, when the weights are there.

    with_images: whether a model that can see is to

    Raises ModelNotSupported, which names what is in the way.
    """
    config, found, left_out = _read_config(path)
    name, text = config.model_type, text_config(config)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelNotSupported(f"{name}: encoder-decoder models are not supported")
    head = head_form(config)
    formats = _take_formats(config)
    for layer_type in getattr(text, "layer_types", None) or ():
        if layer_type not in SUPPORTED_LAYER_TYPES:
            raise ModelNotSupported(f"{name}: layers of type {layer_type} are not supported")
    length = getattr(text, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ModelNotSupported(f"{name}: config.json has no max_position_embeddings")
    vision = find_vision_support(config, path, is_wanted=with_images)
    if head is not None:
        kind = class_under_head(config)
    else:
        kind = whole_class(config) if isinstance(vision, VisionSupport) else text_class(config)
    notes = []
    if found.get("model_type") not in CONFIG_MAPPING:
        notes.append(f"{CONFIG}: model_type {found.get('model_type')!r} is read as {name}, by its architectures")
    if left_out:
        notes.append(f"{CONFIG}: left out, as they would set the library and not the model: {', '.join(left_out)}")
    notes += _unread(found, config, kind)
    return CheckedConfig(
        config=config,
        text=text,
        kind=kind,
        vision=vision,
        formats=formats,
        max_model_len=length,
        eos_token_ids=_ends(found, config),
        notes=tuple(notes),
        head=head,
    )


def _read_config(path: str | Path) -> tuple[PreTrainedConfig, dict[str, Any], list[str]]:
    """Read a folder's configuration by the library's own class, without what would reach out of it.

    The library reads a copy beside which nothing lies, so that no code of the folder can be found. Gives what the file
    says and the keys that were left out as well. Raises ModelNotSupported.
    """
    try:
        found, _ = PreTrainedConfig.get_config_dict(path, local_files_only=True)
        own = CONFIG_MAPPING[_family(found)]
        left_out = sorted({key for each in _mappings(found) for key in each if _reaches_out(key, own)})
        for each in _mappings(found):
            for key in set(left_out) & set(each):
                del each[key]
        with TemporaryDirectory() as alone:
            (Path(alone) / CONFIG).write_text(json.dumps({**found, "model_type": own.model_type}), encoding="utf-8")
            config: PreTrainedConfig = AutoConfig.from_pretrained(alone, local_files_only=True, trust_remote_code=False)
        config.name_or_path = str(path)
    except ModelNotSupported:
        raise
    except Exception as error:  # classes check values in ways of their own
        reason = f"{error}: {error.__cause__}" if error.__cause__ else str(error) or type(error).__name__
        raise ModelNotSupported(f"{CONFIG}: {' '.join(reason.split())}") from error
    return config, found, left_out


def _family(found: Mapping[str, Any]) -> str:
    """Return the `model_type` that transformers knows a configuration's architecture by. Raises ModelNotSupported."""
    name = str(found.get("model_type"))
    if name in CONFIG_MAPPING:
        return name
    architectures = [str(each) for each in found.get("architectures") or ()]
    own_code = str((found.get("auto_map") or {}).get("AutoModelForCausalLM") or "")
    for architecture in architectures:
        kind = class_named(architecture)
        if kind is not None and own_code.rpartition(".")[2] in ("", architecture) and _reads_sizes(kind, found):
            return str(kind.config_class.model_type)
    named = ", ".join([*architectures, *([f"{own_code} of its auto_map"] if own_code else [])]) or "none"
    raise ModelNotSupported(
        f"{CONFIG}: transformers {transformers.__version__} has no class for model_type {name!r} (architectures:"
        f" {named}), and no code of a folder is run; serve the model in a format of transformers (its name often ends"
        " in -hf), or with a transformers that has the class"
    )


def _reads_sizes(kind: type[PreTrainedModel], found: Mapping[str, Any]) -> bool:
    """Return whether a configuration of an unknown type says its sizes in the words of this class."""
    words = kind.config_class.attribute_map
    return {words.get(each, each) for each in SIZES} <= {words.get(key, key) for key in found}


def _mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Walk a configuration's mappings at any depth, but not tables of numbers or of what tensors mean."""
    match value:
        case dict():
            if not value or not all(type(each) is int for each in value.values()):
                yield value
                for key, each in value.items():
                    yield from () if key in _LISTS_OF_TENSORS else _mappings(each)
        case list():
            for each in value:
                yield from _mappings(each)


def _reaches_out(key: str, own: type[PreTrainedConfig]) -> bool:
    """Return whether a key sets the library's machinery instead of the model.

    That is what has no business in a file: private names and names of methods and tables of the library's base class.
    A private key made it run code in spite of its safe settings (CVE-2026-4372).
    """
    if key in {each.name for each in fields(own)}:
        return False
    if key in _REACHING_OUT or key.startswith("_"):
        return True
    machinery = inspect.getattr_static(PreTrainedConfig, key, Ellipsis)
    settable = isinstance(machinery, property) and machinery.fset is not None
    return machinery is not Ellipsis and key != "model_type" and not settable and not isinstance(machinery, int | float)


def _unread(found: Mapping[str, Any], config: PreTrainedConfig, kind: type[PreTrainedModel]) -> Iterator[str]:
    """Name the keys that neither the architecture's configuration, its modules nor its head's reader read."""
    sources = [inspect.getsource(sys.modules[each.__module__]) for each in (type(config), kind)]
    words = set(re.findall(r"\w+", " ".join(sources)))
    parts: list[tuple[Any, Any]] = [(config, found)]
    parts += [(getattr(config, name, None), found.get(name)) for name in config.sub_configs]
    unread = set[str]()
    for part, said in parts:
        if isinstance(part, PreTrainedConfig) and isinstance(said, dict):
            known = {each.name for each in fields(part)} | set(part.attribute_map) | words | READ | {"model_type"}
            unread |= {key for key in said if key in vars(part) and key not in known}
    if unread - _LISTS_OF_TENSORS:
        named = ", ".join(sorted(unread - _LISTS_OF_TENSORS))
        yield f"{CONFIG}: {type(config).__name__} does not read, so it changes nothing: {named}"


def _ends(found: Mapping[str, Any], config: PreTrainedConfig) -> frozenset[int]:
    """Return the ends of text that config.json itself names; the defaults of a class may be ordinary tokens."""
    text = text_config(config)
    parts = [found, *(found.get(name) for name in config.sub_configs if getattr(config, name, None) is text)]
    return token_ids(*(part.get("eos_token_id") for part in parts if isinstance(part, dict)))


def ends_of_generation(folder: Path) -> frozenset[int]:
    """Return the ends of text that generation_config.json names; none if there is no such file."""
    try:
        return token_ids(json.loads((folder / GENERATION_CONFIG).read_bytes()).get("eos_token_id"))
    except (OSError, ValueError, AttributeError):
        return frozenset()


def token_ids(*said: Any) -> frozenset[int]:
    """Return the ids in what files say of a token: an id, a list of them, or nothing."""
    listed = (each for value in said for each in (value if isinstance(value, list) else [value]))
    return frozenset(each for each in listed if type(each) is int)


def _take_formats(config: PreTrainedConfig) -> tuple[Format, ...] | None:
    """Return how weights are stored, and remove that from the configuration: what is loaded is plain."""
    found: Any = None
    for part in (config, text_config(config)):
        for name in ("quantization_config", "compression_config"):
            if getattr(part, name, None) is not None:
                found = found or getattr(part, name)
                delattr(part, name)
    if found is None:
        return None
    return formats_of(found if isinstance(found, dict) else found.to_dict(), config.model_type)


def choose_dtype(
    asked: str,
    own: torch.dtype | None,
    device: torch.device,
    *,
    is_fast: Callable[[torch.dtype], bool] | None = None,
) -> torch.dtype:
    """Return the dtype to compute in: as asked; for "auto" the checkpoint's, but float32 on a CPU that emulates it.

    is_fast: whether the CPU multiplies matrices of this type; None asks the one we run on

    Without AVX-512, AMX or their like a product in bfloat16 takes several times as long as in float32.
    """
    if asked != "auto":
        named: torch.dtype = getattr(torch, asked)
        return named
    if own is None:
        return torch.float32
    if device.type != "cpu" or own.itemsize >= torch.float32.itemsize or (is_fast or cpu_is_fast)(own):
        return own
    return torch.float32


def weight_bytes(checked: CheckedConfig, dtype: torch.dtype, bits: Bits | None = None) -> int:
    """Return the bytes of the weights in these numbers, however they are stored.

    Quantised weights count as dequantised. Tied weights count once, and dropped encoders not at all.

    bits: of the weights of linears; None is those of the numbers

    Raises ModelNotSupported where the model wants a package that is not there, or has a shape that no kernel takes.
    """
    model = shapes_of(checked, dtype)
    if bits is None:
        return held_bytes(model)
    waiting = await_weights(model, bits)
    for each in waiting:
        each.check()
    shown = sum(each.get_parameter("weight").nbytes for each in waiting)
    return held_bytes(model) - shown + sum(each.num_bytes for each in waiting)


def weight_bytes_on_cpu(checked: CheckedConfig, dtype: str, bits: Bits | None = None) -> int:
    """Return the same for this CPU, in the dtype that loading would choose. Raises ModelNotSupported."""
    return weight_bytes(checked, choose_dtype(dtype, checked.dtype, torch.device("cpu")), bits)


def shapes_of(checked: CheckedConfig, dtype: torch.dtype | None = None) -> nn.Module:
    """Return the model without its numbers. Raises ModelNotSupported if it wants a package that is missing."""
    try:
        with torch.device("meta"):
            return from_config(checked.kind, checked.config, dtype=dtype)
    except ImportError as error:
        reason = f"it needs a package that is not installed: {str(error).strip().splitlines()[0]}"
        if "timm" in str(error):
            reason = "it needs the packages timm and pillow, even for text alone: pip install timm pillow"
        raise ModelNotSupported(f"{checked.config.model_type}: {reason}") from error


def held_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers."""
    return sum(tensor.numel() * tensor.itemsize for tensor in (*module.parameters(), *module.buffers()))
