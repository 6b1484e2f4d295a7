"""Finds the folder of a base model and looks whether its files are whole and safe to load.

Whether the engine computes such a model is the engine's to say (`serve_app.engine.decoder.judgement`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serve_app.catalog.files import CatalogError, read_header, read_json_object
from serve_app.core.weight_files import CONFIG, INDEX_SUFFIX, WEIGHTS, WEIGHTS_INDEX, weight_files, weights_name

BUILTIN_MODELS: Mapping[str, Path] = {"builtin:demo": Path(__file__).resolve().parent.parent / "demo" / "model"}
MAX_CONFIG_BYTES = 4 * 2**20
MAX_INDEX_BYTES = 64 * 2**20
SUFFIX = ".safetensors"
PICKLED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})
TO_SAFETENSORS = (
    'convert to safetensors: python -c "from transformers import AutoModelForCausalLM as M;'
    " M.from_pretrained('{path}').save_pretrained('{path}')\""
)


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
            f"{path!r} is not a folder; a model is a local folder with {CONFIG}, {WEIGHTS} and a tokenizer, "
            f"or one of: {', '.join(BUILTIN_MODELS)}"
        )
    return folder.resolve()


def read_model_folder(path: Path) -> ModelFolder:
    """Look whether a model's files are there, and read the headers of its weights; no weight is loaded.

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
    if not (path / CONFIG).is_file():
        raise CatalogError(f"{CONFIG} is missing")
    if (path / CONFIG).stat().st_size > MAX_CONFIG_BYTES:
        raise CatalogError(f"{CONFIG} is larger than {MAX_CONFIG_BYTES} bytes")
    weights = _weight_files(path)
    return ModelFolder(path=path, weights=weights, created=int(max(file.stat().st_mtime for file in weights)))


def _weight_files(path: Path) -> tuple[Path, ...]:
    name = weights_name(path)
    if not _is_inside(name) or not name.endswith((SUFFIX, SUFFIX + INDEX_SUFFIX)):
        raise CatalogError(f"{CONFIG}: transformers_weights: {name!r} is not the name of a safetensors file or index")
    if not (path / name).is_file():
        pickled = sorted(file.name for file in path.iterdir() if file.suffix in PICKLED_SUFFIXES)
        hint = "copy the model's safetensors files into the folder"
        if pickled:
            hint = f"{pickled[0]} is a pickle, which could run code: {TO_SAFETENSORS.format(path=path)}"
        raise CatalogError(f"no weights: neither {WEIGHTS} nor {WEIGHTS_INDEX} is there; {hint}")
    if name.endswith(INDEX_SUFFIX):
        _check_index(path, name)
    files = weight_files(path)
    for file in files:
        read_header(file)
    return files


def _check_index(path: Path, index: str) -> None:
    """Raise CatalogError unless an index names safetensors files beside it, which are there."""
    shards = read_json_object(path / index, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CatalogError(f"{index}: weight_map is missing or empty")
    for name in sorted({str(name) for name in shards.values()}):
        if not _is_inside(name) or not name.endswith(SUFFIX):
            raise CatalogError(f"{index}: {name!r} is not the name of a safetensors file in the folder")
        if not (path / name).is_file():
            raise CatalogError(f"{name} is missing, which {index} names")


def _is_inside(name: str) -> bool:
    """Return whether a name leads nowhere but into the folder."""
    return not Path(name).is_absolute() and ".." not in Path(name).parts
