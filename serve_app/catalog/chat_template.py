"""Reads a model's chat template, its own or the one it is given; nothing here is run."""

from __future__ import annotations

import json
from pathlib import Path

from serve_app.catalog.errors import CatalogError

FILE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
MAX_BYTES = 1 << 20


def chat_template_of(folder: Path, given: str | None) -> str:
    """The template that the model is given in its settings: a file, or the template itself. None is its own.

    Raises CatalogError where there is no such file.
    """
    if given is None:
        return read_chat_template(folder)
    if not given or "{{" in given or "{%" in given:
        return given
    found = _read(Path(given))
    if not found:
        raise CatalogError(f"{given} is no file of a chat template of at most {MAX_BYTES} bytes in UTF-8")
    return found


def read_chat_template(folder: Path) -> str:
    """The template of a model folder; "" where it has none that can be read."""
    own = _read(folder / FILE)
    if own:
        return own
    try:
        config = json.loads(_read(folder / CONFIG) or "{}")
    except ValueError:
        return ""
    found = config.get("chat_template") if isinstance(config, dict) else None
    return found if isinstance(found, str) else _named_default(found)


def _named_default(templates: object) -> str:
    """Of several templates the one named so."""
    for each in templates if isinstance(templates, list) else []:
        if isinstance(each, dict) and each.get("name") == "default" and isinstance(each.get("template"), str):
            return str(each["template"])
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_size <= MAX_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""
