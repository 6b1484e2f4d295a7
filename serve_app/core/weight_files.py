"""Says which files of a model's folder hold its weights, as transformers chooses them: all readers ask here."""

from __future__ import annotations

import hashlib
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


SAMPLED_BYTES = 1 << 16
"""Of a file, at its begin, in its middle and at its end."""


def weights_sample(folder: Path) -> str:
    """Return a digest of the configuration and of samples of the weights: equal folders have equal ones on every host.

    To read all of the weights would take as long as to load them. Raises as `weight_files`, and OSError.
    """
    digest = hashlib.blake2b((folder / CONFIG).read_bytes(), digest_size=16)
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in (0, size // 2, max(0, size - SAMPLED_BYTES)):
                file.seek(place)
                digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()
