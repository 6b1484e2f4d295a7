"""Publishes adapters by themselves, as soon as their folders are complete, where a model's folder is watched."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from serve_app.catalog.adapters import CONFIG, MAX_PUBLISHED_HEADER_BYTES, WEIGHTS, read_adapter
from serve_app.core.adapters import AdapterSet, PublishedAdapter
from serve_app.core.errors import ServeError
from serve_app.router.fleet import Fleet
from serve_app.router.publishing import Publisher, Publishing

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
"""Between the end of a look and the next one."""
MAX_FOLDERS = 10_000
"""Of one model that are watched, the first by name."""
WATCHER = Publisher(name="folder")
NOT_OF_FILES = 500
"""Refusals from this status on say nothing of the files; then the next look tries again."""

Key = tuple[str, str]
"""A base model, and the name of a folder."""
Mark = tuple[object, ...]
"""Tells the files of a folder from what they are after any change."""


class Watching:
    """Looks into the watched folders of all models that have a ready replica.

    Each router has one. If several publish the same version, that is one change: a router publishes for the revision
    of the set that it decided on, and a version that is published already changes nothing.

    A folder that is gone withdraws nothing: its file system may be gone with it.
    """

    def __init__(self, fleet: Fleet, publishing: Publishing) -> None:
        self._fleet = fleet
        self._publishing = publishing
        self._seen: dict[Key, Mark] = {}
        self._judged: dict[Key, tuple[Mark, str]] = {}  # what needs nothing more, with its version; "" is no adapter
        self._first: dict[str, frozenset[str]] = {}
        self._complaints: dict[str, str] = {}

    async def run(self) -> None:
        """Look for ever."""
        while True:
            try:
                await self.look()
            except Exception:
                logger.exception("the folders of adapters could not be watched")
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Look once, and publish what two looks in a row find complete and alike."""
        for base, card in tuple(self._fleet.cards.items()):
            if card.watches_adapters:
                await self._look_into(base, Path(card.adapters_root))

    async def _look_into(self, base: str, root: Path) -> None:
        try:
            found = await asyncio.to_thread(_marks_in, root)
        except OSError as error:
            if self._complaints.get(base) != str(error):
                logger.error("%s, whose adapters are published by themselves, cannot be read: %s", root, error.strerror)
            self._complaints[base] = str(error)
            return
        self._complaints.pop(base, None)
        self._first.setdefault(base, frozenset(found))
        there = {(base, _printable(name)) for name in found}
        for key in [key for key in self._publishing.refused if key[0] == base and key not in there]:
            del self._publishing.refused[key]
        for name, mark in found.items():
            is_settled = self._seen.get((base, name)) == mark
            self._seen[base, name] = mark
            if is_settled and self._judged.get((base, name), ((), ""))[0] != mark:
                await self._take((base, name), root, mark)

    async def _take(self, key: Key, root: Path, mark: Mark) -> None:
        """Judge the files of a folder, and publish them if they are due. 503 leaves them for the next look."""
        (base, name), heard = key, self._publishing.heard
        if heard is None:
            return
        record = await asyncio.to_thread(
            read_adapter, root / name, root=root, max_header_bytes=MAX_PUBLISHED_HEADER_BYTES
        )
        folder, reason = str(mark[0]), record.reason
        published = heard.find(base, name)
        if reason is None and self._is_due(key, heard, record.version):
            if published is not None and not _is_below(root, name, published):
                reason = f"the name is published from {published.path}: publish this folder by hand, or withdraw that"
            else:
                try:
                    address, revision = f"{base}:{name}", heard.revision
                    await self._publishing.publish(address, folder, WATCHER, in_place=True, revision=revision)
                except ServeError as error:
                    if error.status >= NOT_OF_FILES:
                        logger.debug("%r could not be published: %s", folder, error)
                        return
                    reason = error.message
        self._judged[key] = mark, record.version
        told = _printable(name)
        if reason is None:
            self._publishing.refused.pop((base, told), None)
        else:
            self._publishing.refused[base, told] = reason
            logger.warning("%r is not published as %s:%s: %s", folder, base, told, reason)

    def _is_due(self, key: Key, heard: AdapterSet, version: str) -> bool:
        """Return whether a name is to mean this version.

        What was withdrawn, or rolled back, stays so until the files of the folder change.
        """
        base, name = key
        judged, published = self._judged.get(key), heard.find(base, name)
        is_new = judged[1] != version if judged is not None else name not in self._first[base]
        if published is not None:
            is_previous = published.previous is not None and published.previous[0] == version
            return published.version != version and (is_new or not is_previous)
        if name in heard.withdrawn_of(base):
            return is_new
        cards = [link.card.model.adapter(name) for link in self._fleet.links_of(base)]
        return any(card is None or card.version != version for card in cards)


def _marks_in(root: Path) -> dict[str, Mark]:
    """Return the mark of each folder, by name. Raises OSError if the root cannot be read."""
    with os.scandir(root) as entries:
        found = [
            each.name for each in entries if not each.name.startswith(".") and (each.is_symlink() or each.is_dir())
        ]
    return {
        name: (os.path.realpath(root / name), _mark(root / name / CONFIG), _mark(root / name / WEIGHTS))
        for name in sorted(found)[:MAX_FOLDERS]
    }


def _printable(name: str) -> str:
    """Return the name of a folder as it is told: it may hold any bytes."""
    return name if name.isprintable() else ascii(name)[1:-1]


def _mark(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _is_below(root: Path, name: str, published: PublishedAdapter) -> bool:
    """Return whether a version was published from this folder, or from a hidden one that it was a link to."""
    path = Path(published.path)
    first = path.relative_to(root).parts[:1] if path.is_relative_to(root) else ()
    return any(part == name or part.startswith(".") for part in first)
