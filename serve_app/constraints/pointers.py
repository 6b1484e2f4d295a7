"""Finds what `$ref` means within one schema. Nothing is ever fetched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from serve_app.constraints.refusal import Refusal

ROOT = "#"


def child(path: str, *steps: str | int) -> str:
    """The pointer of a part of what `path` points to."""
    return "/".join((path, *(str(step).replace("~", "~0").replace("/", "~1") for step in steps)))


class References:
    """The parts of one schema by what they may be called: pointers, anchors, ids."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._base = root.get("$id", "") if isinstance(root, dict) and isinstance(root.get("$id", ""), str) else ""
        self._named: dict[str, str] | None = None

    def path_of(self, reference: object, path: str) -> str:
        """The pointer of what a reference at `path` means. Raises Refusal."""
        if not isinstance(reference, str):
            raise Refusal('"$ref" must be a string', path)
        target = urljoin(self._base, reference) if self._base else reference
        address, fragment = urldefrag(target)
        if address.rstrip("#") in ("", self._base.rstrip("#")) and (not fragment or fragment.startswith("/")):
            return ROOT + unquote(fragment).rstrip("/")
        if self._named is None:
            self._named = dict(self._names())
        found = self._named.get(target) or self._named.get(reference)
        if found is None:
            raise Refusal(
                f'"$ref" is {reference[:100]!r}, which is not within the schema, and nothing is fetched', path
            )
        return found

    def at(self, target: str, path: str) -> Any:
        """What a pointer leads to. Raises Refusal for one that leads nowhere; `path` is where it stands."""
        found = self._root
        for step in target.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise Refusal(f'"$ref" is {target[:100]!r}, where the schema has nothing', path)
        return found

    def _names(self) -> Iterator[tuple[str, str]]:
        open_parts: list[tuple[str, Any]] = [(ROOT, self._root)]
        while open_parts:
            path, part = open_parts.pop()
            if isinstance(part, dict):
                if isinstance(anchor := part.get("$anchor"), str):
                    yield urljoin(self._base, f"#{anchor}"), path
                if isinstance(name := part.get("$id"), str):
                    yield urljoin(self._base, name), path
                open_parts += [(child(path, key), value) for key, value in part.items()]
            elif isinstance(part, list):
                open_parts += [(child(path, at), value) for at, value in enumerate(part)]
