"""What a tenant has logged of a sample of its requests where it asked: beginnings of prompts and completions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

from serve_app.core.request import GenerationRequest

MAX_CHARS = 1000
"""Of one text; a line has its beginning, and how long it was."""
MAX_TEXTS = 4
"""Prompts, and completions, of one request."""
KEY = re.compile(r"sa-[A-Za-z0-9_-]{8,}")
"""A key, or so much of one as is worth hiding, wherever it was cut."""
HIDDEN = "sa-…"


def is_sampled(request_id: str, *, tenant: str, share: float) -> bool:
    """Whether a request is in the sample: always the same for the same id, and for no tenant because of another."""
    if share <= 0.0:
        return False
    digest = hashlib.sha256(f"{tenant}\n{request_id}".encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


class Excerpts:
    """Of one request, as its completions come. Takes no more than a line may have, however long they get."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self._prompts = [_Text(_texts_of(request)) for request in requests[:MAX_TEXTS]]
        self._completions: dict[int, dict[int, _Text]] = {}

    def note(self, text: str, *, part: int, index: int) -> None:
        """More of a completion."""
        if index in self._completions.get(part, ()) or sum(map(len, self._completions.values())) < MAX_TEXTS:
            self._completions.setdefault(part, {}).setdefault(index, _Text()).add(text)

    def drop(self, part: int) -> None:
        """Its completions are made anew."""
        self._completions.pop(part, None)

    def facts(self) -> dict[str, object]:
        """The texts, keys in them hidden, each with its length in characters."""
        completions = {index: text for of_part in self._completions.values() for index, text in of_part.items()}
        return {
            "prompts": [text.facts() for text in self._prompts],
            "completions": [{"index": index, **completions[index].facts()} for index in sorted(completions)],
        }


class _Text:
    def __init__(self, pieces: Iterable[str] = ()) -> None:
        self._kept = ""
        self._num_chars = 0
        for piece in pieces:
            self.add(piece)

    def add(self, piece: str) -> None:
        self._num_chars += len(piece)
        self._kept += piece[: MAX_CHARS - len(self._kept)]

    def facts(self) -> dict[str, object]:
        return {"text": KEY.sub(HIDDEN, self._kept), "num_chars": self._num_chars}


def _texts_of(request: GenerationRequest) -> list[str]:
    """What the model was to read of it as characters; token ids and pictures are none."""
    return [*request.texts, *(() if request.conversation is None else (request.conversation.source,))]
