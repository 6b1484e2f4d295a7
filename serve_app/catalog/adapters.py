"""Lists the adapters of a base model on disk; a broken one is listed with the reason and harms no other."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from serve_app.catalog.adapter_config import parse_adapter_config
from serve_app.catalog.adapter_tensors import read_changes
from serve_app.catalog.errors import CatalogError
from serve_app.catalog.files import confined_file, read_json_object
from serve_app.catalog.headers import read_header
from serve_app.catalog.mixes import ADAPTER_NAME, is_mix
from serve_app.core.adapters import AdapterRecord
from serve_app.core.cards import AdapterCard

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**20
MAX_WEIGHT_BYTES = 8 * 2**30
NUM_VERSION_CHARS = 32
_PICKLED_WEIGHTS = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pkl")


def read_adapters(folder: Path) -> tuple[AdapterCard, ...]:
    """List the adapters in `adapters/<base>/` as `read_records` finds them, as cards."""
    return tuple(record.card() for record in read_records(folder))


def read_records(folder: Path) -> tuple[AdapterRecord, ...]:
    """List the adapters in `adapters/<base>/`, one per subfolder, sorted by name; none where it does not exist.

    Files and hidden folders are passed over. Never raises for what is wrong with one adapter.
    """
    if not folder.is_dir():
        return ()
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    return tuple(read_adapter(entry, root=folder) for entry in entries if entry.is_symlink() or entry.is_dir())


def read_adapter(path: Path, *, root: Path) -> AdapterRecord:
    """Read one adapter's configuration and header, and digest its files; links may not lead out of `root`."""
    name = os.fsencode(path.name).decode("utf-8", "backslashreplace")
    version = ""
    try:
        if not ADAPTER_NAME.fullmatch(name):
            mixes = ", as * and + mix adapters in an address" if is_mix(name) else ""
            raise CatalogError(f"the name {name!r} is not allowed{mixes}; names match {ADAPTER_NAME.pattern}")
        if not path.resolve().is_relative_to(root.resolve()):
            raise CatalogError(f"the folder {name} is a link that leads out of {root.name}")
        config_path = confined_file(path, CONFIG, root=root)
        weights_path = _weights_path(path, root=root)
        fields = read_json_object(config_path, max_bytes=MAX_CONFIG_BYTES)
        version = _digest(config_path, weights_path)
        created = int(weights_path.stat().st_mtime)
        changes = read_changes(read_header(weights_path), parse_adapter_config(fields))
    except CatalogError as error:
        return AdapterRecord(name=name, path=path, version=version, reason=str(error))
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, on resolving
        return AdapterRecord(name=name, path=path, version=version, reason=f"its files cannot be read: {error}")
    return AdapterRecord(name=name, path=path, version=version, weights=weights_path, changes=changes, created=created)


def _weights_path(path: Path, *, root: Path) -> Path:
    if not (path / WEIGHTS).exists() and not (path / WEIGHTS).is_symlink():
        for pickled in _PICKLED_WEIGHTS:
            if (path / pickled).exists():
                raise CatalogError(f"{pickled} is a pickle, which could run code: convert it to {WEIGHTS}")
    weights_path = confined_file(path, WEIGHTS, root=root)
    num_bytes = weights_path.stat().st_size
    if num_bytes > MAX_WEIGHT_BYTES:
        raise CatalogError(f"{WEIGHTS} has {num_bytes} bytes; allowed are {MAX_WEIGHT_BYTES}")
    return weights_path


def _digest(*paths: Path) -> str:
    """Digest the contents of files, each by itself, so that no bytes can move from one to the next."""
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:NUM_VERSION_CHARS]
