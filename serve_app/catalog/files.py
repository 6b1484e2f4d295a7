"""Reads files of unknown origin, confined and bounded: plain JSON, safetensors headers, and digests that are kept."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


class CatalogError(ValueError):
    """A model folder, an adapter or a setting is refused; the message is a reason that an operator can act on."""


def confined_file(folder: Path, name: str, *, root: Path) -> Path:
    """Return the real path of the regular file `name` in `folder`.

    Raises CatalogError where there is none, or where links lead out of `root`.
    """
    path = folder / name
    real = path.resolve()
    if not real.is_relative_to(root.resolve()):
        raise CatalogError(f"{name} is a link that leads out of the folder")
    if not real.exists():
        raise CatalogError(f"{name} is missing")
    if not stat.S_ISREG(real.stat().st_mode):
        raise CatalogError(f"{name} is not a regular file")
    return real


def read_json_object(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """Read a JSON object. Raises CatalogError, which names the file, for anything else."""
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise CatalogError(f"{path.name} is larger than {max_bytes} bytes")
    return parse_json_object(data, name=path.name)


def parse_json_object(data: bytes, *, name: str) -> dict[str, Any]:
    """Parse a JSON object strictly: UTF-8, no repeated keys, no NaN or Infinity."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except RecursionError:
        raise CatalogError(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise CatalogError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CatalogError(f"{name} must hold a JSON object, found {type(value).__name__}")
    return value


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is given twice")
        found[key] = value
    return found


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


MAX_HEADER_BYTES = 100_000_000  # as the library of the format bounds it
MAX_DIMENSIONS = 8
# The format's name of a type -> ours, bytes per element (https://github.com/huggingface/safetensors#format).
DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "F8_E8M0": ("float8_e8m0fnu", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1), "C64": ("complex64", 8),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """What a header says of one tensor; `dtype` in torch's words."""

    shape: tuple[int, ...]
    dtype: str


def read_header(path: Path, *, max_bytes: int = MAX_HEADER_BYTES) -> dict[str, TensorInfo]:
    """Give the tensors of a safetensors file by name.

    Raises CatalogError unless the header is well formed and its tensors fill the file: no overlap, no gap, and
    nothing behind the end. Reads at most `max_bytes`.
    """
    name = path.name
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CatalogError(f"{name} is no safetensors file: it has {num_bytes} bytes")
        length = int.from_bytes(prefix, "little")
        if length > max_bytes or length > num_bytes - 8:
            raise CatalogError(
                f"{name} is no whole safetensors file: its header of {length} bytes exceeds the file of {num_bytes} "
                f"bytes or the limit of {max_bytes}"
            )
        data = file.read(length)
    header = parse_json_object(data, name=f"the header of {name}")
    header.pop("__metadata__", None)
    tensors = {tensor: _tensor_info(name, tensor, entry=entry) for tensor, entry in header.items()}
    spans = sorted((*entry["data_offsets"], tensor) for tensor, entry in header.items())
    _check_layout(name, spans, num_data_bytes=num_bytes - 8 - length)
    return tensors


def _tensor_info(file_name: str, tensor: str, *, entry: Any) -> TensorInfo:
    where = f"the header of {file_name}: tensor {tensor!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CatalogError(f"{where} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CatalogError(f"{where} has the unknown dtype {dtype!r}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise CatalogError(f"{where} must have a shape of at most {MAX_DIMENSIONS} whole numbers")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CatalogError(f"{where} must have data_offsets [begin, end]")
    ours, num_element_bytes = DTYPES[dtype]
    if math.prod(shape) * num_element_bytes != offsets[1] - offsets[0]:
        raise CatalogError(f"{where} has {offsets[1] - offsets[0]} bytes, which its shape and dtype do not make")
    return TensorInfo(shape=tuple(shape), dtype=ours)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _check_layout(file_name: str, spans: Iterable[tuple[int, int, str]], *, num_data_bytes: int) -> None:
    expected = 0
    for begin, end, tensor in spans:
        if begin != expected:
            fault = "overlaps another" if begin < expected else "leaves a gap before it"
            raise CatalogError(f"the header of {file_name}: tensor {tensor!r} {fault}")
        expected = end
    if expected != num_data_bytes:
        raise CatalogError(
            f"{file_name} holds {num_data_bytes} bytes of data, its header says {expected}; the file is damaged"
        )


SETTLED_S = 2.0
"""A file that changed less than so long ago may change again without another time: it is read the next time, too."""
MAX_DIGESTS_BYTES = 8 << 20
"""Of the file of digests, about 50,000 of them; a larger one is begun anew."""
Stamp = tuple[int, ...]


class Digests:
    """The digests of files of this machine. A later process finds those of an earlier one.

    A digest counts while size, time of the last change of contents and of anything else, and identity are the same.
    Whoever sets times by hand changes the last but one. Several processes may append to the file at once.

    place: the file that keeps them; what is wrong with it is as if it were empty
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._found: dict[Stamp, str] | None = None

    def of(self, path: Path) -> str:
        """Return the SHA-256 of a file's contents, in hexadecimal digits. Raises OSError."""
        if self._found is None:
            self._found = self._read()
        with path.open("rb") as file:
            stamp = _stamp(os.fstat(file.fileno()))
            if stamp in self._found:
                return self._found[stamp]
            begun_ns = time.time_ns()
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            is_steady = stamp == _stamp(os.fstat(file.fileno()))
        if is_steady and begun_ns - max(stamp[:2]) > SETTLED_S * 1e9:
            self._found[stamp] = digest
            with suppress(OSError):
                self._place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with self._place.open("a") as kept:
                    kept.write("\n" + json.dumps([digest, *stamp]))  # another's half line ends before it
        return digest

    def _read(self) -> dict[Stamp, str]:
        found: dict[Stamp, str] = {}
        with suppress(OSError):
            if self._place.stat().st_size > MAX_DIGESTS_BYTES:
                self._place.unlink()
            for line in self._place.read_text(errors="replace").splitlines():
                with suppress(ValueError, TypeError):
                    digest, *stamp = json.loads(line)
                    found[tuple(stamp)] = bytes.fromhex(digest).hex()
        return found


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file's contents, which are read, in hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_dev, status.st_ino
