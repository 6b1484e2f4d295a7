"""Addresses of adapters that lie elsewhere, `s3://bucket/team/sql`: how they are read, and what a listed one covers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from serve_app.catalog.files import CatalogError
from serve_app.core.machine import is_loopback

LIBRARIES: Mapping[str, tuple[str, str]] = {
    "s3": ("s3fs", "pip install 'serve_app[s3]'"),
    "gs": ("gcsfs", "pip install 'serve_app[gs]'"),
    "az": ("adlfs", "pip install 'serve_app[az]'"),
    "hf": ("huggingface_hub", "pip install huggingface_hub"),
    "https": ("aiohttp", "pip install aiohttp"),
    "http": ("aiohttp", "pip install aiohttp"),
}
"""By scheme, the module that fetches it through fsspec, and the command that installs it."""
MAX_URL_CHARS = 1024
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://([^/]*)(?:/(.*))?", re.DOTALL | re.IGNORECASE)
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(:[0-9]{1,5})?")
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+@,~-]*")
_OTHER_REPOSITORIES = frozenset({"datasets", "spaces", "buckets"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One address, normalised. place: bucket, container, host with port, or owner on the hub;  folders: below it"""

    scheme: str
    place: str
    folders: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join((self.place, *self.folders))}"

    def covers(self, other: Source) -> bool:
        """Return whether the other one lies below this one."""
        if (self.scheme, self.place) != (other.scheme, other.place) or len(other.folders) <= len(self.folders):
            return False
        begin = other.folders[: len(self.folders)]
        return begin == self.folders or (self.scheme == "hf" and _unpinned(begin) == self.folders)


def is_address(path: str) -> bool:
    """Return whether a path is meant as an address, not as a folder of this machine."""
    return "://" in path


def parse_source(text: str) -> Source:
    """Read an address strictly. Raises CatalogError, which says what is wrong and repeats no secret.

    Each folder is written as it is called: no `..`, no `%2e`, no empty one. Thus no two addresses mean the same place,
    and what begins like a listed prefix lies below it.
    """
    found = _URL.fullmatch(text)
    if found is None or len(text) > MAX_URL_CHARS:
        raise CatalogError(f"it is no address of at most {MAX_URL_CHARS} characters, scheme://place/folder")
    scheme, place, rest = found[1].lower(), found[2], found[3] or ""
    if scheme not in LIBRARIES:
        raise CatalogError(f"its scheme is {scheme[:20]!r}; allowed are {', '.join(LIBRARIES)}")
    if "@" in place or "?" in text or "#" in text:
        raise CatalogError("it has credentials, a query or a fragment; credentials come from the node that fetches")
    is_web = scheme in ("https", "http")
    if not _HOST.fullmatch(place) or (":" in place and not is_web):
        raise CatalogError("its host or bucket has other characters than letters, digits, dots and hyphens")
    folders = tuple(rest.removesuffix("/").split("/")) if rest.removesuffix("/") else ()
    if rest == "/" or not all(map(_FOLDER.fullmatch, folders)):
        raise CatalogError(
            "one of its folders is empty, hidden, `..`, or has other characters than letters, digits and ._=+@,~-"
        )
    if scheme == "http" and not is_loopback(place.partition(":")[0]):
        raise CatalogError("http is for this machine alone; use https")
    if scheme == "hf" and place in _OTHER_REPOSITORIES:
        raise CatalogError("it is no repository of a model, hf://owner/name")
    if scheme == "hf" and folders and folders[0].partition("@")[2] == "refs":  # refs/pr/1: anybody may write it
        raise CatalogError("its revision is a pull request or a conversion; name a branch, a tag or a commit")
    return Source(scheme=scheme, place=place.lower() if is_web else place, folders=folders)


def missing_library(scheme: str) -> str | None:
    """Return the command that installs what a scheme needs; None if this machine can fetch it."""
    module, command = LIBRARIES[scheme]
    return None if find_spec(module) is not None and find_spec("fsspec") is not None else command


def _unpinned(folders: tuple[str, ...]) -> tuple[str, ...]:
    """Return folders on the hub without the revision that follows the repository."""
    return (folders[0].partition("@")[0], *folders[1:]) if folders else ()
