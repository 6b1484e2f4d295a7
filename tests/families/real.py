"""Tries small files of real models with random weights, scaled down, against transformers.

`python -m tests.families.real FOLDERS` tries them all and writes `tests/families/real.md`, the table of docs/models.md.
Each folder below FOLDERS holds what a model's repository holds beside weights, or a part of that. What is not there is
ours: the configuration of a small llama, and a tokenizer of bytes with the special tokens of tokenizer_config.json.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from serve_app.engine.decoder.text_part import ModelNotSupported, text_config
from serve_app.engine.engine import Engine
from tests.engine.harness import complete, config, make_engine, request
from tests.families.families import SECTIONED
from tests.families.making import HIDDEN, POSITIONS, auto_class, fill, make_config, small, small_tower

SHARED = Path(__file__).resolve().parents[2] / ".." / "shared" / "real-folders"
TABLE = Path(__file__).with_name("real.md")
PROMPT = [35, 71, 104, 40, 97, 110, 33, 64, 55]
MAX_TOKENS = 6
KEPT = {*POSITIONS, "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "is_decoder", "tie_word_embeddings"}
EXTRA = {
    "glm4v_text": {"rope_parameters": SECTIONED},
    "mllama_text_model": {"num_hidden_layers": 2, "cross_attention_layers": [1]},
    "gemma4_text": {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One folder of real files, made whole.

    source: the files;  path: the folder that is served
    """

    source: Path
    path: Path

    @property
    def name(self) -> str:
        return self.source.name

    @cached_property
    def engine(self) -> Engine:
        return make_engine(config(self.path, max_model_len=64, kv_cache_bytes=8 << 20))

    @cached_property
    def reference(self) -> PreTrainedModel:
        """The whole model by the library's own class, from the same files."""
        own = read_config(self.path)
        assert own is not None
        model: PreTrainedModel = auto_class(own).from_pretrained(self.path, config=own, dtype="float32")
        return model.eval()


def loads(case: Case) -> str:
    """Return the family that a folder is served as, or why it is refused."""
    try:
        return str(case.engine.model.module.config.model_type)
    except ModelNotSupported as error:
        unserved = "are not supported" in str(error)
        return f"refused, {UNKNOWN if 'has no class' in str(error) else LAYERS if unserved else error}"


def tokens(case: Case) -> str:
    """Return whether greedy tokens are those of `generate` in float32."""
    got = complete(case.engine, [(request("a", max_tokens=MAX_TOKENS), PROMPT)])["a", 0].token_ids
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        out = case.reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False,
            generation_config=GenerationConfig(eos_token_id=sorted(case.engine.model.eos_token_ids) or None),
        )  # fmt: skip
    return _told(got == out[0, len(PROMPT) :].tolist())


def ends(case: Case) -> str:
    """Return whether a text ends at all ends that the tokenizer, config.json and generation_config.json name."""
    said = [_read(case.path / "config.json"), _read(case.path / "generation_config.json")]
    said += [part for part in said[0].values() if isinstance(part, dict)]
    named = [part.get("eos_token_id") for part in said]
    has_code = "auto_map" in _read(case.path / "tokenizer_config.json")
    kind = PreTrainedTokenizerFast if has_code else AutoTokenizer
    named.append(kind.from_pretrained(case.path).eos_token_id)
    if not any(named[:-1]):
        named.append(text_config(AutoConfig.from_pretrained(case.path)).eos_token_id)  # its class's own
    wanted = {each for value in named for each in (value if isinstance(value, list) else [value])} - {None}
    return _told({each for each in wanted if each < case.engine.model.vocab_size} == case.engine.model.eos_token_ids)


COLUMNS: Mapping[str, Callable[[Case], str]] = {"tokens": tokens, "ends": ends}
"""What is tried of a folder that loads, by the column of the table."""


UNKNOWN = "transformers has no class"
LAYERS = "of layers that are not served"


def names(root: Path = SHARED) -> list[str]:
    """Return the folders of models."""
    return sorted(each.name for each in root.iterdir() if each.is_dir() and not each.name.startswith("adapter-"))


def make(source: Path, path: Path) -> Case:
    """Write the model of a folder of real files, and none where transformers has no class for it."""
    path.mkdir(parents=True)
    for file in source.iterdir():
        if file.name != "preprocessor_config.json":  # that of the file, not of a small tower
            shutil.copyfile(file, path / file.name)
    raw = _read(path / "config.json") or own_config(path)
    (path / "config.json").write_text(json.dumps(raw))
    if (whole := read_config(path)) is None:
        save_file({}, path / "model.safetensors")
        return Case(source=source, path=path)
    (path / "config.json").write_text(json.dumps(scaled(raw, whole)))
    whole = read_config(path)
    assert whole is not None
    assert text_config(whole).hidden_size == HIDDEN["hidden_size"], "a class of its own words is not scaled down"
    if not any((path / each).is_file() for each in ("tokenizer.json", "vocab.json")):
        write_tokenizer(path, vocab_size=int(text_config(whole).vocab_size))
    model = auto_class(whole).from_config(whole, dtype=torch.float32)
    fill(model, zlib.crc32(source.name.encode()))
    with tempfile.TemporaryDirectory(dir=path.parent) as saved:
        model.save_pretrained(saved, max_shard_size="2GB")
        Path(saved, "model.safetensors").rename(path / "model.safetensors")
    return Case(source=source, path=path)


def own_config(path: Path) -> dict[str, Any]:
    """Return the configuration of a llama whose vocabulary holds the tokens that tokenizer_config.json numbers."""
    numbers = map(int, _read(path / "tokenizer_config.json").get("added_tokens_decoder") or {})
    found: dict[str, Any] = make_config("llama", {"vocab_size": max(numbers, default=0) + 300}).to_dict()
    return {name: value for name, value in found.items() if name not in ("dtype", "architectures")}


def read_config(path: Path) -> PreTrainedConfig | None:
    """Return a folder's configuration as the library's own class reads it; None where it has none."""
    raw = _read(path / "config.json")
    raw.pop("auto_map", None)
    raw.pop("quantization_config", None)  # weights are made plain
    if raw.get("model_type") not in CONFIG_MAPPING:
        kind = getattr(transformers, raw["architectures"][0], None)
        if kind is None or "hidden_size" not in raw:
            return None
        raw["model_type"] = kind.config_class.model_type
    with tempfile.TemporaryDirectory() as alone:
        Path(alone, "config.json").write_text(json.dumps(raw))
        own: PreTrainedConfig = AutoConfig.from_pretrained(alone)
    return own


def scaled(raw: Mapping[str, Any], whole: PreTrainedConfig) -> dict[str, Any]:
    """Return what a config.json says, with few and small layers; vocabularies, positions and token ids stay."""
    text = text_config(whole)
    towers = {name: getattr(whole, name) for name in whole.sub_configs if getattr(whole, name, None) is not text}
    own = dict(raw)
    for name, tower in towers.items():
        if tower is not None and isinstance(own.get(name), dict):
            own[name] = {**own[name], **small_tower(tower)}
    sizes = {**small(text), **EXTRA.get(text.model_type, {})}
    if "kv_lora_rank" in sizes:
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"], "head_dim": raw.get("head_dim")}
    is_flat = text is whole or text.hidden_size == raw.get("hidden_size") != type(text)().hidden_size
    part = own if is_flat else own.setdefault("text_config", {})
    part |= {name: size for name, size in sizes.items() if name not in KEPT and size is not None}
    if not is_flat and getattr(text, "rope_parameters", None):
        part.setdefault("rope_parameters", text.rope_parameters)
    part |= {name: _shortened(part[name]) for name in ("rope_scaling", "rope_parameters") if part.get(name)}
    return own


def _shortened(rope: Any) -> Any:
    """Fit what is said of each frequency to heads of eight."""
    if isinstance(rope, list):
        return rope[:4]
    if not isinstance(rope, dict):
        return rope
    return {name: [2, 1, 1] if name == "mrope_section" else _shortened(value) for name, value in rope.items()}


def write_tokenizer(path: Path, *, vocab_size: int) -> None:
    """Write one token a byte, and the special tokens of tokenizer_config.json, by their numbers where it has them."""
    named = _read(path / "tokenizer_config.json")
    ids = {each["content"]: int(number) for number, each in (named.get("added_tokens_decoder") or {}).items()}
    texts = [named.get(f"{name}_token") for name in ("bos", "eos", "pad", "unk")]
    free = iter(sorted(set(range(vocab_size)) - set(ids.values())))
    vocabulary = {letter: next(free) for letter in sorted(pre_tokenizers.ByteLevel.alphabet())}
    for each in texts:
        content = each.get("content") if isinstance(each, dict) else each
        if content and content not in ids:
            ids[content] = next(free)
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, **ids}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in ids])
    tokenizer.save(str(path / "tokenizer.json"))


def rows(root: Path, chosen: list[str]) -> dict[str, dict[str, str]]:
    """Try folders, and return what came of each by the column of the table."""
    found = {}
    for name in chosen:
        with tempfile.TemporaryDirectory() as place:
            case = make(root / name, Path(place) / name)
            found[name] = {"family": loads(case)}
            if not found[name]["family"].startswith("refused"):
                found[name] |= {column: tried(case) for column, tried in COLUMNS.items()}
            print(name, *found[name].values(), sep=" | ", flush=True)
    return found


def table(found: Mapping[str, Mapping[str, str]]) -> str:
    """Return the rows as a table of a page."""
    head = ["folder", "family", *COLUMNS]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += [
        "| " + " | ".join([name, *(row.get(each, "") for each in head[1:])]) + " |" for name, row in found.items()
    ]
    return "\n".join(lines) + "\n"


def _told(is_equal: bool) -> str:
    return "equal" if is_equal else "DIFFERENT"


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


if __name__ == "__main__":
    disable_progress_bar()
    set_verbosity_error()
    folders = Path(sys.argv[1])
    written = table(rows(folders, sys.argv[2:] or names(folders)))
    print(written)
    if len(sys.argv) == 2:
        TABLE.write_text(written)
