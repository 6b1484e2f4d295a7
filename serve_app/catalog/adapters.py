"""Lists the adapters of a base model on disk; a broken one is listed with the reason and harms no other."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from serve_app.catalog.files import (
    MAX_HEADER_BYTES,
    CatalogError,
    TensorInfo,
    confined_file,
    digest_of,
    read_header,
    read_json_object,
)
from serve_app.catalog.resolve import ADAPTER_NAME, is_mix
from serve_app.core.cards import AdapterRecord

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**20
MAX_PUBLISHED_HEADER_BYTES = 16 * 2**20
MAX_WEIGHT_BYTES = 8 * 2**30
MAX_NAME_CHARS = 512
NUM_VERSION_CHARS = 32
DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
MERGE = "merge it into its base (PEFT's merge_and_unload, then save_pretrained) and serve that folder as a model"
CONVERT = (
    'convert it: python -c "import torch; from safetensors.torch import save_file; save_file({{name: each.contiguous()'
    " for name, each in torch.load('{0}', map_location='cpu', weights_only=True).items()}}, '" + WEIGHTS + "')\""
)
_OTHER_WEIGHTS: Mapping[str, str] = {
    "adapter_model.bin": "a pickle, which could run code: " + CONVERT,
    "adapter_model.pt": "a pickle, which could run code: " + CONVERT,
    "adapter_model.pkl": "a pickle, which could run code: " + CONVERT,
    "adapters.safetensors": "of mlx-lm: fuse it with its base (mlx_lm.fuse) and serve that folder as a model",
    "model.safetensors": "of a whole model: name its folder as `path` of a model of its own",
    "model.safetensors.index.json": "of a whole model: name its folder as `path` of a model of its own",
}


def read_records(folder: Path) -> tuple[AdapterRecord, ...]:
    """List the adapters in `adapters/<base>/`, one per subfolder, sorted by name.

    Files and hidden folders are passed over. Never raises for what is wrong with one adapter. Raises CatalogError
    where there is no such folder, or where it is an adapter itself.
    """
    if not folder.is_dir():
        raise CatalogError(
            f"{str(folder)!r} is no folder; `adapters` names a folder with one folder for each adapter: make it, or"
            " leave `adapters` out"
        )
    if (folder / CONFIG).exists():
        raise CatalogError(
            f"{str(folder)!r} is an adapter itself; `adapters` names the folder around it: {str(folder.parent)!r}"
        )
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    return tuple(read_adapter(entry, root=folder) for entry in entries if entry.is_symlink() or entry.is_dir())


def read_published(path: Path, name: str, digest: Callable[[Path], str] = digest_of) -> AdapterRecord:
    """Read an adapter that was published under a name, whatever its folder is called, while sequences are computed."""
    return read_adapter(path, root=path.parent, name=name, max_header_bytes=MAX_PUBLISHED_HEADER_BYTES, digest=digest)


def read_adapter(
    path: Path,
    *,
    root: Path,
    name: str | None = None,
    max_header_bytes: int = MAX_HEADER_BYTES,
    digest: Callable[[Path], str] = digest_of,
) -> AdapterRecord:
    """Read one adapter's configuration and header, and digest its files; links may not lead out of `root`.

    name: None is the folder's own;  digest: of the weights' file
    """
    name = name or os.fsencode(path.name).decode("utf-8", "backslashreplace")
    version = ""
    try:
        if not ADAPTER_NAME.fullmatch(name):
            mixes = ", as * and + mix adapters in an address" if is_mix(name) else ""
            raise CatalogError(f"the name {name!r} is not allowed{mixes}; names match {ADAPTER_NAME.pattern}")
        if not path.resolve().is_relative_to(root.resolve()):
            raise CatalogError(f"the folder {name} is a link that leads out of {root.name}; copy the folder")
        config_path = _config_path(path, root=root)
        weights_path = _weights_path(path, root=root)
        fields = read_json_object(config_path, max_bytes=MAX_CONFIG_BYTES)
        weights_digest = digest(weights_path)
        version = _version(config_path, weights_digest)
        created = int(weights_path.stat().st_mtime)
        _check_kind(fields)
        tensors = _shapes(read_header(weights_path, max_bytes=max_header_bytes))
    except CatalogError as error:
        return AdapterRecord(name=name, path=path, version=version, reason=str(error))
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, on resolving
        return AdapterRecord(name=name, path=path, version=version, reason=f"its files cannot be read: {error}")
    return AdapterRecord(
        name=name,
        path=path,
        version=version,
        weights=weights_path,
        weights_digest=weights_digest,
        fields=fields,
        tensors=tensors,
        created=created,
    )


def read_version(path: Path, *, root: Path) -> str:
    """Return the digest of an adapter's files, without judging them. Links may not lead out of `root`.

    Raises CatalogError where one is missing or too large.
    """
    config_path, weights_path = _config_path(path, root=root), _weights_path(path, root=root)
    if config_path.stat().st_size > MAX_CONFIG_BYTES:
        raise CatalogError(f"{CONFIG} is larger than {MAX_CONFIG_BYTES} bytes")
    return _version(config_path, digest_of(weights_path))


def _config_path(path: Path, *, root: Path) -> Path:
    """Find the configuration. Raises CatalogError, which says where another one is."""
    if not (path / CONFIG).exists() and not (path / CONFIG).is_symlink():
        inner = next((each.parent for depth in ("*", "*/*") for each in sorted(path.glob(f"{depth}/{CONFIG}"))), None)
        if inner is not None:
            raise CatalogError(
                f"{CONFIG} is missing; there is one in {str(inner.relative_to(path))!r}: move that folder into"
                f" {root.name!r} under a name of its own"
            )
        _refuse_others(path)
    return confined_file(path, CONFIG, root=root)


def _weights_path(path: Path, *, root: Path) -> Path:
    if not (path / WEIGHTS).exists() and not (path / WEIGHTS).is_symlink():
        _refuse_others(path)
    weights_path = confined_file(path, WEIGHTS, root=root)
    num_bytes = weights_path.stat().st_size
    if num_bytes > MAX_WEIGHT_BYTES:
        raise CatalogError(f"{WEIGHTS} has {num_bytes} bytes; allowed are {MAX_WEIGHT_BYTES}")
    return weights_path


def _refuse_others(path: Path) -> None:
    for other, what in _OTHER_WEIGHTS.items():
        if (path / other).exists():
            raise CatalogError(f"{other} is {what.format(other)}")


def _check_kind(fields: Mapping[str, Any]) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise CatalogError(
            f'{CONFIG}: peft_type must be "LORA", found {str(kind)[:80]!r}; {MERGE}, or train LoRA where PEFT cannot'
            " merge it (prompts and prefixes)"
        )


def _shapes(header: Mapping[str, TensorInfo]) -> dict[str, tuple[int, ...]]:
    if not header:
        raise CatalogError(f"{WEIGHTS} has no tensors; save the adapter again with PEFT's save_pretrained")
    for name, info in header.items():
        if len(name) > MAX_NAME_CHARS:
            raise CatalogError(f"a tensor has a name of {len(name)} characters; allowed are {MAX_NAME_CHARS}")
        if ".lora_" in name and info.dtype not in DTYPES:
            raise CatalogError(f"tensor {name!r} is {info.dtype}; allowed are {', '.join(sorted(DTYPES))}")
    return {name: info.shape for name, info in header.items()}


def _version(config_path: Path, weights_digest: str) -> str:
    """Digest both files, each by itself, so that no bytes can move from one to the other."""
    both = bytes.fromhex(digest_of(config_path) + weights_digest)
    return hashlib.sha256(both).hexdigest()[:NUM_VERSION_CHARS]
