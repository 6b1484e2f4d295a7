"""Reads adapters that were published: from a folder that the machine sees, or from an address, through its cache."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from serve_app.catalog.adapters import read_published, read_version
from serve_app.catalog.cache import DIGESTS, AdapterCache, place_in
from serve_app.catalog.files import CatalogError, Digests
from serve_app.catalog.sources import is_address
from serve_app.core.cards import AdapterRecord
from serve_app.core.errors import InvalidRequest, ServeError, Unavailable
from serve_app.core.machine import command, variables

logger = logging.getLogger(__name__)

FETCH_S = 600.0
"""In which an adapter must have been fetched."""
RETRY_S = 10
PATH = "lora_path"
REFUSED = "refused"
ONLINE: Mapping[str, str] = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
"""For the process that fetches alone; a replica's own libraries stay offline."""


class PublishedFiles:
    """Reads adapters for one replica, or for one publication. It blocks, and one thread at a time uses it.

    What it read from an address stays in the machine's cache until it is released; others find it there, by digest.

    environ: of the machine: the cache, credentials and endpoints
    """

    def __init__(self, environ: Mapping[str, str] | None = None, *, fetch_s: float = FETCH_S) -> None:
        self._environ = os.environ if environ is None else environ
        self._fetch_s = fetch_s
        self._opened: AdapterCache | None = None
        self._digests = Digests(place_in(self._environ) / DIGESTS)

    def read(self, path: str, name: str, version: str) -> AdapterRecord:
        """Read a version of an adapter; a record of another version where the files have changed.

        What is wrong with the files is in the record. Raises InvalidRequest and Unavailable for what cannot be fetched.
        """
        if not is_address(path):
            return read_published(Path(path), name, self._digests.of)
        with self._failing() as cache:
            found = self._kept(cache, name, version)
            if found is not None:
                return found
            with cache.alone(version):  # others of this machine that want it wait, and find it
                if (found := self._kept(cache, name, version)) is not None:
                    return found
                told, folder = self._fetch(cache, path, wanted=version)
            if folder is None:
                return AdapterRecord(name=name, path=Path(path), version=told)
            return read_published(folder, name)

    def fetch(self, url: str) -> str:
        """Fetch what lies at an address now, keep it, and return its version. Raises InvalidRequest, Unavailable."""
        with self._failing() as cache:
            return self._fetch(cache, url)[0]

    def release(self, versions: Iterable[str]) -> None:
        """Let the cache remove versions."""
        if self._opened is not None:
            for each in versions:
                self._opened.release(each)

    def close(self) -> None:
        """Release everything."""
        if self._opened is not None:
            self._opened.close()

    def _kept(self, cache: AdapterCache, name: str, version: str) -> AdapterRecord | None:
        """Return what the cache has of a version, and hold it; None if it is not there, or not what it was."""
        folder = cache.hold(version)
        record = None if folder is None else read_published(folder, name, self._digests.of)
        if record is None or record.version == version:
            return record
        logger.warning("the cached files of adapter version %s are damaged", version)
        cache.release(version)
        return None

    def _fetch(self, cache: AdapterCache, url: str, *, wanted: str | None = None) -> tuple[str, Path | None]:
        """Return version and folder of what lies at an address; no folder where another version is wanted."""
        with cache.unfinished() as folder:
            self._run(url, folder)
            version = read_version(folder, root=folder)
            if wanted not in (None, version):
                return version, None
            _drop_damaged(cache, version)
            return version, cache.keep(folder, version)

    def _run(self, url: str, folder: Path) -> None:
        try:
            done = subprocess.run(
                command("serve_app.catalog.fetching", url, str(folder)),
                env=variables({**self._environ, **ONLINE}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=self._fetch_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise _unreached(f"{url} was not fetched within {self._fetch_s:g} s") from None
        try:
            told = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            logger.error("the process that fetches %s ended with %d", url, done.returncode)
            raise _unreached(f"the process that fetches {url} ended with {done.returncode}") from None
        if told:
            logger.warning("adapter at %s: %s", url, told["detail"])
            if told["kind"] != REFUSED:
                raise _unreached(f"{url}: {told['reason']}")
            must = "be an adapter that this machine can fetch"
            raise InvalidRequest.refusing(PATH, must=must, found=f"{url}: {told['reason']}")

    @contextmanager
    def _failing(self) -> Iterator[AdapterCache]:
        """Give the cache, and turn what goes wrong with it or with the files into what a publisher is told."""
        try:
            if self._opened is None:
                self._opened = AdapterCache.of(self._environ)
            yield self._opened
        except CatalogError as error:
            must = "be an adapter that this machine can fetch"
            raise InvalidRequest.refusing(PATH, must=must, found=f"one that is refused: {error}") from None
        except OSError as error:
            logger.error("the cache of adapters: %s", error)
            raise _unreached(f"the cache of adapters on that machine cannot be used ({error.strerror})") from None


def _drop_damaged(cache: AdapterCache, version: str) -> None:
    """Remove a version whose files are not what they were: a machine that lost power may have kept other bytes."""
    folder = cache.hold(version)
    try:
        is_whole = folder is None or read_version(folder, root=folder) == version
    except (CatalogError, OSError):
        is_whole = False
    if not is_whole:
        cache.release(version)
        cache.drop(version)


def _unreached(reason: str) -> ServeError:
    return Unavailable(f'"{PATH}" cannot be fetched now: {reason}.', PATH, {"retry_after_s": RETRY_S})
