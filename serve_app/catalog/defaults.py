"""What a model's folder recommends: sampling parameters, chat templates, how it embeds a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from serve_app.catalog.files import CatalogError, read_json_object
from serve_app.core.request import EmbeddingForm, Pooling

GENERATION_CONFIG = "generation_config.json"
MAX_GENERATION_BYTES = 2**20
COUNT = 2**31 - 1
NUMBER = 1e9
ELSEWHERE = frozenset((
    "do_sample", "eos_token_id", "bos_token_id", "pad_token_id", "transformers_version", "use_cache",
    "cache_implementation",
))  # fmt: skip
"""Read below or by others, or of no text."""


class Bounds(NamedTuple):
    """A parameter of a request, and the values that it may have."""

    name: str
    low: float
    high: float
    is_count: bool = False


PARAMETERS: Mapping[str, Bounds] = {
    "temperature": Bounds("temperature", 0, NUMBER),
    "top_p": Bounds("top_p", 0, 1),
    "top_k": Bounds("top_k", -1, COUNT, is_count=True),
    "min_p": Bounds("min_p", 0, 1),
    "typical_p": Bounds("typical_p", 1e-9, 1),
    "repetition_penalty": Bounds("repetition_penalty", 1e-9, NUMBER),
    "presence_penalty": Bounds("presence_penalty", -NUMBER, NUMBER),
    "frequency_penalty": Bounds("frequency_penalty", -NUMBER, NUMBER),
    "max_new_tokens": Bounds("max_tokens", 1, COUNT, is_count=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultSampling:
    """What requests to a model sample with, where they do not say it themselves.

    values:  by the names of a request's parameters
    unheard: sentences about what else the file says; nothing follows from that
    """

    values: tuple[tuple[str, float], ...] = ()
    unheard: tuple[str, ...] = ()


def read_default_sampling(folder: Path) -> DefaultSampling:
    """Read a model folder's recommended sampling; wrong values are left out and reported. `do_sample: false` means
    greedy.
    """
    try:
        said = read_json_object(folder / GENERATION_CONFIG, max_bytes=MAX_GENERATION_BYTES)
    except FileNotFoundError:
        return DefaultSampling()
    except (OSError, CatalogError) as error:
        return DefaultSampling(unheard=(f"{GENERATION_CONFIG}: no sampling is read of it: {error}",))
    values: dict[str, float] = {}
    unheard = []
    others = [key for key, value in said.items() if value and key not in {*PARAMETERS, *ELSEWHERE} and key[:1] != "_"]
    if others:
        unheard.append(f"{GENERATION_CONFIG}: not carried out here: {', '.join(others)}")
    for key, bounds in PARAMETERS.items():
        value = said.get(key)
        if value is None:
            continue
        if (number := _within(bounds, value)) is None:
            must = f"must be a {'whole ' * bounds.is_count}number from {bounds.low:g} to {bounds.high:g}"
            unheard.append(f"{GENERATION_CONFIG}: {key} {must} and is not read, found {str(value)[:40]}")
        else:
            values[bounds.name] = number
    if said.get("do_sample") is False:
        values["temperature"] = 0.0
    return DefaultSampling(values=tuple(values.items()), unheard=tuple(unheard))


def _within(bounds: Bounds, value: object) -> float | None:
    """Return the value if it is a number within the bounds. A count of -1 means none, as 0 does."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not bounds.low <= value <= bounds.high:
        return None
    if not bounds.is_count:
        return float(value)
    return max(0, int(value)) if value == int(value) else None


TEMPLATE_FILE = "chat_template.jinja"
FOLDER = "additional_chat_templates"
MEMBER = "chat_template"
CONFIGS = ("processor_config.json", "chat_template.json")
"""Files of a processor, which come before a tokenizer's."""
TOKENIZER_CONFIG = "tokenizer_config.json"
MAX_TEMPLATE_BYTES = 1 << 20
MAX_CONFIG_BYTES = 64 << 20
DEFAULT, TOOL_USE = "default", "tool_use"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplates:
    """ "" is none. tool_use: for chats with tools, where that is another one"""

    default: str = ""
    tool_use: str = ""

    def __bool__(self) -> bool:
        return bool(self.default or self.tool_use)


def chat_templates_of(folder: Path, given: str | None) -> ChatTemplates:
    """Return the template given in the model's settings, as a file or as text; None means the folder's own.

    Raises CatalogError where there is no such file, or it cannot be read.
    """
    if given is None:
        return read_chat_templates(folder)
    if not given or "{{" in given or "{%" in given:
        return ChatTemplates(default=given)
    if not Path(given).is_file():
        raise CatalogError(f"{given} is no file of a chat template, and no template")
    return ChatTemplates(default=_text(Path(given), MAX_TEMPLATE_BYTES))


def read_chat_templates(folder: Path) -> ChatTemplates:
    """Return the templates of a model folder, found as AutoProcessor and then AutoTokenizer find them.

    Raises CatalogError for a file that cannot be read.
    """
    for name in CONFIGS:
        if found := _in_config(folder / name):
            return found
    files = sorted((folder / FOLDER).glob("*.jinja"))
    if (folder / TEMPLATE_FILE).exists():
        files.append(folder / TEMPLATE_FILE)
    named = {DEFAULT if path.name == TEMPLATE_FILE else path.stem: _text(path, MAX_TEMPLATE_BYTES) for path in files}
    return _chosen(named) if named else _in_config(folder / TOKENIZER_CONFIG)


def _in_config(path: Path) -> ChatTemplates:
    """Return the templates in a JSON file: one, several by name, or a list of them."""
    if not path.exists():
        return ChatTemplates()
    try:
        config = json.loads(_text(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise CatalogError(f"{path} is not JSON: {error}") from error
    found = config.get(MEMBER) if isinstance(config, dict) else None
    if isinstance(found, list) and all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in found):
        found = {each["name"]: each.get("template") for each in found}
    named = {DEFAULT: found or ""} if isinstance(found, str | None) else found
    if not isinstance(named, dict) or not all(isinstance(text, str) for each in named.items() for text in each):
        must = 'a text, a list of objects with "name" and "template", or an object of texts'
        raise CatalogError(f'"{MEMBER}" in {path} must be {must}; `chat_template` in the model\'s args can replace it')
    if longest := next((name for name, text in named.items() if len(text) > MAX_TEMPLATE_BYTES), None):
        raise CatalogError(f"the chat template {longest} in {path} has more than {MAX_TEMPLATE_BYTES} characters")
    return _chosen(named)


def _chosen(named: Mapping[str, str]) -> ChatTemplates:
    return ChatTemplates(default=named.get(DEFAULT, ""), tool_use=named.get(TOOL_USE, ""))


def _text(path: Path, max_bytes: int) -> str:
    """Return a template file's text. Raises CatalogError."""
    try:
        if (num_bytes := path.stat().st_size) > max_bytes:
            raise CatalogError(f"{path} has {num_bytes} bytes, and at most {max_bytes} are read for a chat template")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogError(
            f"{path} cannot be read: {error}; `chat_template` in the model's args can replace it"
        ) from error


MODULES = "modules.json"
POOLING = "1_Pooling"
SENTENCES = "sentence_bert_config.json"
MODES: Mapping[str, Pooling] = {
    **dict.fromkeys(("cls", "cls_token"), "first"),
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
    "max": "max",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "mean_sqrt_len": "mean_sqrt",
    "weightedmean": "weighted_mean",
    "weightedmean_tokens": "weighted_mean",
}
KNOWN = ("Transformer", "Pooling", "Normalize")


def read_embedding_form(folder: Path) -> EmbeddingForm:
    """Return how a model folder says to embed; by default the mean, divided by its length.

    What it asks for beyond that is the form's reason to refuse embeddings.
    """
    modules = _read(folder / MODULES, [])
    named = [each for each in modules if isinstance(each, dict)] if isinstance(modules, list) else []
    kinds = [str(each.get("type", "")).rsplit(".", 1)[-1] for each in named]
    paths = [str(each.get("path")) for each, kind in zip(named, kinds, strict=True) if kind == "Pooling"]
    pooling, reason = _pooling(_read(folder / (paths[0] if paths else POOLING) / "config.json", {}))
    unknown = [kind for kind in kinds if kind not in KNOWN]
    if unknown:
        reason = f"{MODULES} has a module {unknown[0]}, which is not computed here"
    sentences = _read(folder / SENTENCES, {})
    longest = sentences.get("max_seq_length") if isinstance(sentences, dict) else None
    return EmbeddingForm(
        pooling=pooling,
        normalizes=not kinds or "Normalize" in kinds,
        max_tokens=longest if isinstance(longest, int) and longest > 0 else None,
        lowers_case=isinstance(sentences, dict) and sentences.get("do_lower_case") is True,
        reason=reason,
    )


def _pooling(config: Any) -> tuple[Pooling, str | None]:
    """Return the pooling that a configuration switches on, or the reason it is not supported."""
    if not isinstance(config, dict) or not config:
        return "mean", None
    prefix = "pooling_mode_"
    found = [key.removeprefix(prefix) for key, is_on in config.items() if key.startswith(prefix) and is_on is True]
    if isinstance(config.get("pooling_mode"), str):
        found = [config["pooling_mode"]]
    if len(found) == 1 and found[0] in MODES:
        return MODES[found[0]], None
    return "mean", f"its pooling is {' and '.join(found) or 'none'}, and one of {', '.join(MODES)} can be had"


def _read(path: Path, absent: Any) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return absent
