"""How far the completions of a prompt have come, so that they can go on elsewhere exactly where they stopped."""

from __future__ import annotations

from array import array
from dataclasses import replace

from serve_app.core.delta import Delta
from serve_app.core.request import Continued, GenerationRequest


class Progress:
    """What came of one prompt, whatever replicas computed it.

    Law: what is taken of all attempts together is what one that was never disturbed tells.
    """

    __slots__ = ("_completions", "_is_reported")

    def __init__(self, request: GenerationRequest) -> None:
        wanted = request.logprobs
        waits = wanted is not None and wanted.top is not None
        self._completions = [_Completion(waits=waits) for _ in range(request.n)]
        self._is_reported = False

    @property
    def has_begun(self) -> bool:
        """Whether anything was told that another replica has to go on with."""
        return self._is_reported or any(each.has_begun for each in self._completions)

    def token_ids(self, sample: int, *, most: int) -> tuple[int, ...]:
        """Return the first tokens of a completion."""
        return tuple(self._completions[sample].token_ids[:most])

    def take(self, delta: Delta) -> Delta | None:
        """Return what is new in a delta of the present attempt; None where nothing is."""
        if delta.prompt is not None:
            delta = replace(delta, prompt=None) if self._is_reported else delta
            self._is_reported = True
        return self._completions[delta.sample].take(delta)

    def go_on(self, request: GenerationRequest) -> GenerationRequest:
        """Begin another attempt; return what it asks of its replica."""
        if not self.has_begun:
            return request
        continued = tuple(each.go_on() for each in self._completions)
        return replace(request, continued=continued, is_reported=self._is_reported)


class _Completion:
    """One completion. Every place in it is a number of tokens, of characters and of entries of log-probabilities.

    A token's log-probabilities may be told later than the token. So another attempt goes on behind the last place at
    which none waited, and tells again what came after it. That is left out by its length: it is the same.

    told:    of all attempts
    at:      where the present attempt is; never beyond what was told
    settled: the last place at which no entry waited, and Mirostat's bound there
    waits:   whether log-probabilities of its tokens are told at all
    """

    __slots__ = ("_at", "_settled", "_told", "_waits", "has_ended", "token_ids")

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self.token_ids = array("I")
        self._told = self._at = (0, 0, 0)
        self._settled: tuple[tuple[int, int, int], float | None] = ((0, 0, 0), None)
        self.has_ended = False

    @property
    def has_begun(self) -> bool:
        return self.has_ended or self._told != (0, 0, 0)

    def take(self, delta: Delta) -> Delta | None:
        new = delta if self._at == self._told else self._beyond(delta)
        self.token_ids.extend(new.token_ids)
        num_tokens, num_chars, num_logprobs = self._at
        self._at = at = (
            num_tokens + len(delta.token_ids),
            num_chars + len(delta.text),
            num_logprobs + len(delta.logprobs),
        )
        if new is delta:
            self._told = at
        else:
            told = self._told
            self._told = max(at[0], told[0]), max(at[1], told[1]), max(at[2], told[2])
        if at == self._told and (not self._waits or at[0] == at[2]):
            self._settled = at, delta.mu
        self.has_ended = delta.finish is not None
        has_news = new is delta or new.text or new.token_ids or not new.is_bare
        return new if has_news else None

    def _beyond(self, delta: Delta) -> Delta:
        """Return the part of a delta that was not told yet."""
        tokens, chars, logprobs = (told - at for told, at in zip(self._told, self._at, strict=True))
        return replace(
            delta,
            text=delta.text[chars:],
            token_ids=delta.token_ids[tokens:],
            logprobs=delta.logprobs[logprobs:],
            mu=None,
        )

    def go_on(self) -> Continued | None:
        """Begin at the last settled place; None where it has ended."""
        if self.has_ended:
            return None
        self._at, mu = self._settled
        return Continued(token_ids=tuple(self.token_ids[: self._at[0]]), mu=mu)
