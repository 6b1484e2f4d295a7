"""Finds the folder of a base model and looks whether its files are whole and safe to load.

Whether the engine computes such a model is the engine's to say (`serve_app.engine.judgement`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.catalog.errors import CatalogError
from serve_app.catalog.files import read_json_object
from serve_app.catalog.headers import read_header

BUILTIN_MODELS: Mapping[str, Path] = {"builtin:demo": Path(__file__).resolve().parent.parent / "demo" / "model"}
MAX_CONFIG_BYTES = 4 * 2**20
MAX_INDEX_BYTES = 64 * 2**20
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
PICKLED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})

_PRIVATE_KEYS_ALLOWED = frozenset({"_name_or_path", "_commit_hash", "_sliding_window_pattern"})
# Keys that make a library fetch or run code.
_REFUSED_KEYS: Mapping[str, str] = {
    "auto_map": "the model asks for code of its own, which is never run",
    "custom_pipelines": "the model asks for code of its own, which is never run",
    "attn_implementation": "only the engine chooses an attention implementation; remove it",
    "experts_implementation": "only the engine chooses an experts implementation; remove it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A base model on disk whose files may be loaded.

    created: Unix seconds of the newest weight file
    """

    path: Path
    weights: tuple[Path, ...]
    created: int


def locate_model(path: str) -> Path:
    """Turn a model's setting into a folder: `builtin:demo` is packaged, all else is a local path."""
    if path.startswith("builtin:"):
        if path not in BUILTIN_MODELS:
            raise CatalogError(f"no model {path!r} is built in; allowed: {', '.join(BUILTIN_MODELS)}")
        return BUILTIN_MODELS[path]
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CatalogError(
            f"{path!r} is not a folder; a model is a local folder with {CONFIG}, {WEIGHTS} and {TOKENIZER}, "
            f"or one of: {', '.join(BUILTIN_MODELS)}"
        )
    return folder.resolve()


def read_model_folder(path: Path) -> ModelFolder:
    """Read what a model's configuration asks for and the headers of its weights; no weight is loaded.

    Operators choose model folders, and caches link their files, so links are followed here.
    Raises CatalogError, whose message begins with the folder, where its files are not all there or must not be loaded.
    """
    try:
        return _read_model_folder(path)
    except CatalogError as error:
        raise CatalogError(f"model folder {path}: {error}") from None
    except OSError as error:
        raise CatalogError(f"model folder {path}: its files cannot be read: {error}") from error


def _read_model_folder(path: Path) -> ModelFolder:
    for name in (CONFIG, TOKENIZER):
        if not (path / name).is_file():
            raise CatalogError(f"{name} is missing")
    config = read_json_object(path / CONFIG, max_bytes=MAX_CONFIG_BYTES)
    _refuse_keys(config)
    weights = _weight_files(path)
    return ModelFolder(
        path=path,
        weights=weights,
        created=int(max(file.stat().st_mtime for file in weights)),
    )


def _refuse_keys(config: Mapping[str, Any]) -> None:
    for key, value in _entries(config):
        if key in _REFUSED_KEYS and value:
            raise CatalogError(f"{CONFIG}: {key}: {_REFUSED_KEYS[key]}")
        # CVE-2026-4372: a private key in config.json made the library run code in spite of its safe settings.
        if key.startswith("_") and key not in _PRIVATE_KEYS_ALLOWED:
            raise CatalogError(f"{CONFIG}: {key}: private settings of the library are refused; remove it")


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Walk all keys at any depth."""
    open_values: list[Any] = [config]
    while open_values:
        match open_values.pop():
            case dict() as entries:
                yield from entries.items()
                open_values.extend(entries.values())
            case list() as values:
                open_values.extend(values)


def _weight_files(path: Path) -> tuple[Path, ...]:
    if (path / WEIGHTS).is_file():
        names: tuple[str, ...] = (WEIGHTS,)
    elif (path / WEIGHTS_INDEX).is_file():
        names = _shard_names(path)
    else:
        pickled = sorted(file.name for file in path.iterdir() if file.suffix in PICKLED_SUFFIXES)
        hint = f"; {pickled[0]} is a pickle, which could run code: convert to safetensors" if pickled else ""
        raise CatalogError(f"no weights: neither {WEIGHTS} nor {WEIGHTS_INDEX} is there{hint}")
    for name in names:
        read_header(path / name)
    return tuple(path / name for name in names)


def _shard_names(path: Path) -> tuple[str, ...]:
    shards = read_json_object(path / WEIGHTS_INDEX, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CatalogError(f"{WEIGHTS_INDEX}: weight_map is missing or empty")
    names = sorted({str(name) for name in shards.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CatalogError(f"{WEIGHTS_INDEX}: {name!r} is not the name of a safetensors file beside it")
        if not (path / name).is_file():
            raise CatalogError(f"{name} is missing, which {WEIGHTS_INDEX} names")
    return tuple(names)
