"""A program of its own that fetches the two files of one adapter through fsspec, within bounds, and ends.

`python -m serve_app.catalog.fetching ADDRESS FOLDER`. A process of its own can be ended at any time, and keeps the
libraries of stores out of routers and replicas. The folder is an unfinished one of the machine's cache. The last line
of its output is a JSON object, empty or with what went wrong.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from serve_app.catalog.adapters import CONFIG, MAX_CONFIG_BYTES, MAX_WEIGHT_BYTES, WEIGHTS
from serve_app.catalog.cache import AdapterCache, CacheFull
from serve_app.catalog.files import CatalogError
from serve_app.catalog.sources import Source, missing_library, parse_source

MOST_BYTES: Mapping[str, int] = {CONFIG: MAX_CONFIG_BYTES, WEIGHTS: MAX_WEIGHT_BYTES}
BLOCK_BYTES = 16 * 2**20
PARENT_PERIOD_S = 1.0
IDENTITY = ("size", "ETag", "etag", "generation", "LastModified", "Last-Modified", "last_modified", "blob_id")
"""What a store says of a file that changes when the file does."""
REFUSED, UNREACHED = "refused", "unreached"
NO_CREDENTIALS = frozenset({"NoCredentialsError", "DefaultCredentialsError", "GatedRepoError"})
MAX_DETAIL_CHARS = 400
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|CONNECTION_STRING", re.IGNORECASE)
_QUERY = re.compile(r"\?[^\s'\"]*")


class Redirected(CatalogError):
    """The server answered with another address."""


def fetch(source: Source, folder: Path, cache: AdapterCache) -> None:
    """Fetch an adapter's files into an unfinished folder: 1. ask for sizes; 2. reserve room; 3. read; 4. ask again.

    Raises CatalogError, and whatever the libraries raise.
    """
    command = missing_library(source.scheme)
    if command is not None:
        raise CatalogError(f"this machine cannot fetch {source.scheme}:// yet; run `{command}` on it")
    files = _file_system(source.scheme)
    paths = {name: _path(source, name) for name in MOST_BYTES}
    found = {name: _identity(files, path, name) for name, path in paths.items()}
    cache.reserve(folder, {name: each["size"] for name, each in found.items()})
    for name, path in paths.items():
        _read(files, path, folder / name, size=found[name]["size"])
    files.invalidate_cache()
    if found != {name: _identity(files, path, name) for name, path in paths.items()}:
        raise CatalogError("its files changed while they were fetched; publish it again")


def failure(error: BaseException, source: Source, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what is told of an error: its kind, the reason for whoever publishes, and the detail for our own log."""
    chain = list(_chain(error))
    detail = _scrubbed("; ".join(f"{type(each).__name__}: {each}" for each in chain), environ)
    ours = next((each for each in chain if isinstance(each, CatalogError)), None)
    statuses = [status for each in chain if (status := _status(each)) is not None]
    if ours is not None:
        kind, reason = UNREACHED if isinstance(ours, CacheFull) else REFUSED, str(ours)
    elif any(isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT) for each in chain):
        kind, reason = UNREACHED, "the disk with the machine's cache of adapters is full; make room on it"
    elif 401 in statuses or 403 in statuses:
        kind, reason = REFUSED, "the store does not let this machine read it (403); give the machine credentials"
    elif 404 in statuses or (isinstance(error, FileNotFoundError) and source.scheme not in ("https", "http")):
        kind, reason = REFUSED, f"there is no {CONFIG} and {WEIGHTS} (404)"
    else:
        seen = type(chain[-1]).__name__ + (f", status {statuses[0]}" if statuses else "")
        kind, reason = UNREACHED, f"{source.scheme}://{source.place} cannot be read ({seen})"
    return {"kind": kind, "reason": reason, "detail": detail}


def main(arguments: list[str]) -> None:
    """Fetch, print the outcome and end; whoever started it need not be there any more."""
    source, folder = parse_source(arguments[0]), Path(arguments[1])
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        fetch(source, folder, AdapterCache.of(os.environ))
        told: dict[str, str] = {}
    except Exception as error:
        told = failure(error, source, os.environ)
    print(json.dumps(told), flush=True)
    os._exit(0)  # libraries keep threads and connections


def _file_system(scheme: str) -> Any:
    import fsspec  # imported here: it takes time, and some machines fetch nothing

    if scheme not in ("https", "http"):
        return fsspec.filesystem(scheme, skip_instance_cache=True)
    import aiohttp

    async def refuse(_session: object, _context: SimpleNamespace, _redirect: object) -> None:
        raise Redirected("its server redirects to another address, which is not followed; publish that one")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    of_node = {"trust_env": True, "trace_configs": [trace]}  # proxies and ~/.netrc
    return fsspec.filesystem(scheme, skip_instance_cache=True, block_size=0, client_kwargs=of_node)


def _path(source: Source, name: str) -> str:
    inner = "/".join((source.place, *source.folders, name))
    return f"{source.scheme}://{inner}" if source.scheme in ("https", "http") else inner


def _identity(files: Any, path: str, name: str) -> dict[str, Any]:
    info = files.info(path)
    size = info.get("size")
    if info.get("type", "file") != "file" or not isinstance(size, int):
        raise CatalogError(f"the store does not say how large {name} is")
    if size > MOST_BYTES[name]:
        raise CatalogError(f"{name} has {size} bytes; allowed are {MOST_BYTES[name]}")
    return {key: info[key] for key in IDENTITY if key in info}


def _read(files: Any, path: str, to: Path, *, size: int) -> None:
    """Read a file of a size that was told before. Raises CatalogError for one of another size."""
    left = size
    with files.open(path, "rb", cache_type="none") as opened, to.open("r+b") as written:
        while left > 0 and (block := opened.read(min(BLOCK_BYTES, left))):
            left -= len(block)
            written.write(block[: left + len(block)])
    if left:
        raise CatalogError(f"{to.name} ended after {size - left} of {size} bytes; publish it again")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error of any of the libraries stands for."""
    if type(error).__name__ in NO_CREDENTIALS or (isinstance(error, PermissionError) and error.filename is None):
        return 403
    response = getattr(error, "response", None)
    values = (
        getattr(error, "status", None),
        getattr(error, "status_code", None),
        getattr(error, "code", None),
        getattr(response, "status_code", None),
        response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None,
    )
    return next((each for each in values if isinstance(each, int)), None)


def _scrubbed(text: str, environ: Mapping[str, str]) -> str:
    """Return a text without queries of addresses and without values of the environment that are secrets."""
    for name, value in environ.items():
        if _SECRET.search(name) and len(value) >= 6:
            text = text.replace(value, "…")
    return _QUERY.sub("?…", text)[:MAX_DETAIL_CHARS]


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_PERIOD_S)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
