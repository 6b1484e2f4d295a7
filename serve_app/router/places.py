"""How much of a stream its client has: told by the id of each event, and read from `Last-Event-ID`.

An id has an entry for each choice, between commas, of those up to the last one that has begun. `57.14` are 57
characters of text that 14 tokens gave, as the engine told them, and not as they are shown; `57.14.13` are 13 entries of
log-probabilities, too. Behind an `e` the choice has ended, but for as many events as a number there says. A number
behind `~` counts events behind the last choice. So an id means the same to every router, however each of them makes
events of what it is told. Behind an `@` it is signed with the stream's secret, as the ledger goes by what a client has:
tokens of a prompt that was lost count again, but for those that the client was sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from hmac import compare_digest

from serve_app.api.error_text import shown
from serve_app.core.errors import InvalidRequest
from serve_app.core.progress import Place
from serve_app.router.inbox import Event

NAME = "Last-Event-ID"
ENTRY = re.compile(r"(\d+)(?:\.(\d+)(?:\.(\d+))?)?(?:(e)(\d+)?)?")
MAX_CHOICES = 128
"""Each event tells of every choice; so streams of more choices have no ids, and are fetched from their beginning."""


class Places:
    """Writes the ids of one response's events. secret: of the stream"""

    def __init__(self, num_choices: int, secret: bytes) -> None:
        self._secret = secret
        self._at: list[Place] = [(0, 0, 0)] * num_choices
        self._entries = [""] * num_choices

    def begin(self, index: int) -> None:
        """Note that a choice has begun, and has nothing yet."""
        self._entries[index] = self._entries[index] or "0"

    def advance(self, event: Event) -> None:
        """Note what comes with an event."""
        delta, (tokens, chars, logprobs) = event.delta, self._at[event.index]
        tokens, chars = tokens + len(delta.token_ids), chars + len(delta.text)
        logprobs += len(delta.logprobs)
        self._at[event.index] = tokens, chars, logprobs
        entry = f"{chars}.{tokens}.{logprobs}" if logprobs else f"{chars}.{tokens}"
        self._entries[event.index] = entry if delta.finish is None else entry + "e"

    def line(self, index: int | None = None, *, num_left: int = 0, num_behind: int = 0) -> bytes:
        """Return the line of an event. num_left: that belong to the same end of this choice, and come behind it"""
        entries = self._entries
        if index is not None and num_left:
            entries = [*entries]
            entries[index] += str(num_left)
        text = ",".join(entries).rstrip(",")
        return b"id: %s\n" % signed(f"{text}~{num_behind}" if num_behind else text, self._secret)


def signed(text: str, secret: bytes) -> bytes:
    """Return a place as an id that nobody else can write."""
    place = text.encode()
    return b"%s@%s" % (place, blake2b(place, key=secret, digest_size=8).hexdigest().encode())


@dataclass(slots=True, kw_only=True)
class SeenChoice:
    """What a client has of one choice. num_left: events of its end that it lacks"""

    place: Place
    has_ended: bool
    num_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a client has of a stream, by choice. num_behind: events behind the last choice"""

    choices: Mapping[int, SeenChoice] = field(default_factory=dict)
    num_behind: int = 0

    @property
    def num_tokens(self) -> dict[int, int]:
        """By choice."""
        return {index: each.place[0] for index, each in self.choices.items()}


def read_places(text: str, secret: bytes) -> Seen:
    """Read the `Last-Event-ID` of a stream with this secret. Raises InvalidRequest for what no router has written."""
    place = text.partition("@")[0]
    if not compare_digest(signed(place, secret), text.encode()):
        must = "be the id of an event of this stream, or be left out for all of it"
        raise InvalidRequest.refusing(NAME, must=must, found=shown(text))
    of_choices, _, of_tail = place.partition("~")
    choices = {}
    for index, entry in enumerate(of_choices.split(",")):
        if (found := ENTRY.fullmatch(entry)) is not None:
            chars, tokens, logprobs = (int(each or 0) for each in found.groups()[:3])
            choices[index] = SeenChoice(
                place=(tokens, chars, logprobs), has_ended=bool(found[4]), num_left=int(found[5] or 0)
            )
    return Seen(choices=choices, num_behind=int(of_tail or 0))
