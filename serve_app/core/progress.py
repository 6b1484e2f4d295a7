"""How far the completions of a prompt have come, so that they can go on elsewhere exactly where they stopped."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

from serve_app.core.delta import Delta, PromptReport, TokenLogprob
from serve_app.core.request import Continued, GenerationRequest

MAX_KEPT_SCORES = 1 << 16
"""Log-probabilities, those beside a token's own included; a stream that has more of them is kept no longer."""

Place = tuple[int, int, int]
"""In a completion: a number of tokens, of characters and of entries of log-probabilities."""


def before(delta: Delta, place: Place) -> Delta:
    """Return the beginning of a delta, without its end."""
    tokens, chars, logprobs = place
    return replace(
        delta,
        text=delta.text[:chars],
        token_ids=delta.token_ids[:tokens],
        logprobs=delta.logprobs[:logprobs],
        finish=None,
        recording=None,
        mu=None,
    )


def behind(delta: Delta, place: Place) -> Delta:
    """Return a delta without its beginning."""
    tokens, chars, logprobs = place
    return replace(
        delta, text=delta.text[chars:], token_ids=delta.token_ids[tokens:], logprobs=delta.logprobs[logprobs:], mu=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """One prompt of a stream that is kept, and all that was told of it, in order.

    numerics: of the replica that told it, where another has to go on with the same; "" is any
    is_taken: another request has just fetched it, and goes on with it
    """

    request: GenerationRequest
    deltas: tuple[Delta, ...] = ()
    numerics: str = ""
    is_taken: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether every completion has."""
        return sum(each.finish is not None for each in self.deltas) == self.request.n


class Progress:
    """What came of one prompt, whatever replicas computed it.

    Law: what is taken of all attempts together is what one that was never disturbed tells.

    is_kept: whether all that was told is remembered
    """

    __slots__ = ("_completions", "_num_scores_left", "_report", "is_kept")

    def __init__(self, request: GenerationRequest) -> None:
        wanted = request.logprobs
        waits = wanted is not None and wanted.top is not None
        self.is_kept = request.kept is not None
        self._num_scores_left = MAX_KEPT_SCORES // (1 if request.kept is None else request.kept.num_parts)
        self._completions = [_Completion(waits=waits, keeps=self.is_kept) for _ in range(request.n)]
        self._report: PromptReport | None = None

    @property
    def has_begun(self) -> bool:
        """Whether anything was told that another replica has to go on with."""
        return self._report is not None or any(each.has_begun for each in self._completions)

    @property
    def has_ended(self) -> bool:
        """Whether every completion has."""
        return all(each.has_ended for each in self._completions)

    @property
    def past(self) -> tuple[Delta, ...]:
        """All that was told, where it is kept. Another one that takes it has come as far."""
        told = [delta for sample, each in enumerate(self._completions) for delta in each.past(sample)]
        if self._report is not None:
            first, rest = (told[0], told[1:]) if told and not told[0].sample else (Delta(request_id="", sample=0), told)
            told = [replace(first, prompt=self._report), *rest]
        return tuple(told)

    def token_ids(self, sample: int, *, most: int) -> tuple[int, ...]:
        """Return the first tokens of a completion."""
        return tuple(self._completions[sample].token_ids[:most])

    def take(self, delta: Delta) -> Delta | None:
        """Return what is new in a delta of the present attempt; None where nothing is."""
        if delta.prompt is not None:
            if self._report is None:
                self._report = delta.prompt
            else:
                delta = replace(delta, prompt=None)
        news = self._completions[delta.sample].take(delta)
        if self.is_kept and news is not None and (news.logprobs or news.prompt is not None):
            self._num_scores_left -= _num_scores(news)
            if self._num_scores_left < 0:
                self.is_kept = False
                for each in self._completions:
                    each.keep_no_more()
        return news

    def go_on(self, request: GenerationRequest) -> GenerationRequest:
        """Begin another attempt; return what it asks of its replica."""
        if not self.has_begun:
            return request
        asked = [0 if each is None else each.num_counted for each in request.continued] or [0] * request.n
        continued = tuple(each.go_on(counted) for each, counted in zip(self._completions, asked, strict=True))
        kept, past = (request.kept, self.past) if self.is_kept else (None, ())
        return replace(request, continued=continued, is_reported=self._report is not None, kept=kept, past=past)


def _num_scores(delta: Delta) -> int:
    """Return how many log-probabilities a delta has."""
    report = delta.prompt
    of_prompt = () if report is None else (report.logprobs or (), report.whole_logprobs or ())
    return sum([1 + len(entry.top) for entries in (delta.logprobs, *of_prompt) for entry in entries])


class _Completion:
    """One completion. Every place in it is a number of tokens, of characters and of entries of log-probabilities.

    A token's log-probabilities may be told later than the token. So another attempt goes on behind the last place at
    which none waited, and tells again what came after it. That is left out by its length: it is the same.

    told:    of all attempts
    at:      where the present attempt is; never beyond what was told
    settled: the last place at which no entry waited, and Mirostat's bound there
    waits:   whether log-probabilities of its tokens are told at all
    keeps:   whether texts and scores are remembered, beside tokens
    """

    __slots__ = ("_at", "_end", "_keeps", "_logprobs", "_settled", "_text", "_told", "_waits", "token_ids")

    def __init__(self, *, waits: bool, keeps: bool) -> None:
        self._waits, self._keeps = waits, keeps
        self.token_ids = array("I")
        self._text = bytearray()
        self._logprobs: list[TokenLogprob] = []
        self._told: Place = (0, 0, 0)
        self._at: Place = (0, 0, 0)
        self._settled: tuple[Place, float | None] = ((0, 0, 0), None)
        self._end: Delta | None = None

    @property
    def has_ended(self) -> bool:
        return self._end is not None

    @property
    def has_begun(self) -> bool:
        return self.has_ended or self._told != (0, 0, 0)

    def keep_no_more(self) -> None:
        """Forget texts and scores, and remember no more of them."""
        self._keeps = False
        self._text.clear()
        self._logprobs.clear()

    def past(self, sample: int) -> Iterator[Delta]:
        """Yield what was told up to the last settled place, and what came behind it."""
        text = self._text.decode("utf-8", "surrogatepass")
        whole = Delta(
            request_id="",
            sample=sample,
            text=text,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self._logprobs),
            finish=None if self._end is None else self._end.finish,
            recording=None if self._end is None else self._end.recording,
        )
        place, mu = self._settled
        if place != (0, 0, 0):
            yield replace(before(whole, place), mu=mu)
        if self.has_ended or place != self._told:
            yield behind(whole, place)

    def take(self, delta: Delta) -> Delta | None:
        new = delta if self._at == self._told else self._beyond(delta)
        self.token_ids.extend(new.token_ids)
        if self._keeps:
            self._text += new.text.encode("utf-8", "surrogatepass")
            self._logprobs += new.logprobs
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
        if delta.finish is not None:
            self._end = delta
        has_news = new is delta or new.text or new.token_ids or not new.is_bare
        return new if has_news else None

    def _beyond(self, delta: Delta) -> Delta:
        """Return the part of a delta that was not told yet."""
        told, at = self._told, self._at
        return behind(delta, (told[0] - at[0], told[1] - at[1], told[2] - at[2]))

    def go_on(self, num_counted: int) -> Continued | None:
        """Begin at the last settled place; None where it has ended. num_counted: as the attempt before was told"""
        if self.has_ended:
            return None
        self._at, mu = self._settled
        return Continued(
            token_ids=tuple(self.token_ids[: self._at[0]]), mu=mu, num_counted=max(num_counted, self._told[0])
        )
