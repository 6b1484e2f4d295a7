"""Says which files of a model's folder hold its weights, as transformers chooses them: all readers ask here."""

from __future__ import annotations

import json
from pathlib import Path

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
INDEX_SUFFIX = ".index.json"


def weights_name(folder: Path) -> str:
    """Return the file that the weights are found by: `transformers_weights` of config.json, one file, or an index."""
    try:
        named = json.loads((folder / CONFIG).read_bytes()).get("transformers_weights")
    except (OSError, ValueError, AttributeError, RecursionError):
        named = None
    if isinstance(named, str):
        return named
    return WEIGHTS if (folder / WEIGHTS).is_file() else WEIGHTS_INDEX


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the files that hold the weights, in the order in which they are read; all others are left alone.

    Raises OSError, ValueError or KeyError where an index cannot be read, which the catalog looks at before.
    """
    name = weights_name(folder)
    if not name.endswith(INDEX_SUFFIX):
        return (folder / name,)
    return tuple(folder / each for each in sorted(set(json.loads((folder / name).read_bytes())["weight_map"].values())))
