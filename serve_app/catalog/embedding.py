"""Reads how a model's folder has texts embedded, as sentence-transformers writes it down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app.core.request import EmbeddingForm, Pooling

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
    """Of a model folder; the mean, divided by its length, where it says nothing.

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
    """Which one a configuration switches on, and why it cannot be had."""
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
