"""Reads a model's chat templates, its own or the one it is given; nothing here is run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serve_app.catalog.errors import CatalogError

FILE = "chat_template.jinja"
FOLDER = "additional_chat_templates"
MEMBER = "chat_template"
CONFIGS = ("processor_config.json", "chat_template.json")
"""Files of a processor, which come before a tokenizer's."""
CONFIG = "tokenizer_config.json"
MAX_BYTES = 1 << 20
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
    """The template that the model is given in its settings: a file, or the template itself. None is its own.

    Raises CatalogError where there is no such file, or it cannot be read.
    """
    if given is None:
        return read_chat_templates(folder)
    if not given or "{{" in given or "{%" in given:
        return ChatTemplates(default=given)
    if not Path(given).is_file():
        raise CatalogError(f"{given} is no file of a chat template, and no template")
    return ChatTemplates(default=_text(Path(given), MAX_BYTES))


def read_chat_templates(folder: Path) -> ChatTemplates:
    """The templates of a model folder, as AutoProcessor and behind it AutoTokenizer find them.

    Raises CatalogError for a file that cannot be read.
    """
    for name in CONFIGS:
        if found := _in_config(folder / name):
            return found
    files = sorted((folder / FOLDER).glob("*.jinja"))
    if (folder / FILE).exists():
        files.append(folder / FILE)
    named = {DEFAULT if path.name == FILE else path.stem: _text(path, MAX_BYTES) for path in files}
    return _chosen(named) if named else _in_config(folder / CONFIG)


def _in_config(path: Path) -> ChatTemplates:
    """Those in a file of JSON: one, several by name, or a list of them."""
    if not path.exists():
        return ChatTemplates()
    try:
        config = json.loads(_text(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise CatalogError(f"{path} is not JSON: {error}") from error
    found = config.get(MEMBER) if isinstance(config, dict) else None
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        found = {each.get("name"): each.get("template") for each in found}
    named = {DEFAULT: found or ""} if isinstance(found, str | None) else found
    if not isinstance(named, dict) or not all(isinstance(text, str) for each in named.items() for text in each):
        must = 'a text, a list of objects with "name" and "template", or an object of texts'
        raise CatalogError(f'"{MEMBER}" in {path} must be {must}; `chat_template` in the model\'s args can replace it')
    if longest := next((name for name, text in named.items() if len(text) > MAX_BYTES), None):
        raise CatalogError(f"the chat template {longest} in {path} has more than {MAX_BYTES} characters")
    return _chosen(named)


def _chosen(named: Mapping[str, str]) -> ChatTemplates:
    return ChatTemplates(default=named.get(DEFAULT, ""), tool_use=named.get(TOOL_USE, ""))


def _text(path: Path, max_bytes: int) -> str:
    """Raises CatalogError."""
    try:
        if (num_bytes := path.stat().st_size) > max_bytes:
            raise CatalogError(f"{path} has {num_bytes} bytes, and at most {max_bytes} are read for a chat template")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogError(
            f"{path} cannot be read: {error}; `chat_template` in the model's args can replace it"
        ) from error
