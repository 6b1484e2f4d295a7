"""Counts and times one run: what its usage, timings, log line and metrics are read from, with excerpts of its texts."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from serve_app.api.responses import Timings
from serve_app.core.delta import Delta, FinishReason, PromptReport, Usage
from serve_app.core.request import GenerationRequest


@dataclass(slots=True)
class PromptStats:
    """One prompt for one model, whatever replicas computed it.

    completion_tokens: by choice; num_completion_tokens: of all of them; num_generated: computed for this run
    pauses: in which another replica was found and caught up, seconds on the monotonic clock
    predicted, engine_ns: of those choices that have ended, see `Usage` and `Finish`
    past: completion tokens that another run had told, some of them still to be told again; None where none has
    """

    report: PromptReport | None = None
    first_at: float | None = None
    last_at: float | None = None
    completion_tokens: dict[int, int] = field(default_factory=dict)
    num_completion_tokens: int = 0
    num_generated: int = 0
    finish_reasons: Counter[FinishReason] = field(default_factory=Counter)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    predicted: tuple[int, int] | None = None
    engine_ns: int = 0
    past: int | None = None


class RunStats:
    """Fed by the run alone, with every delta when it comes.

    entered_at:    by the monotonic clock, seconds
    num_generated: tokens computed, those of completions that never ended included
    num_moves:     attempts that were lost, and went on elsewhere
    excerpts:      of those texts that its tenant has logged; None where none are
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.excerpts: Excerpts | None = None
        self._clock = clock
        self._prompts: dict[int, PromptStats] = {}
        self._num_moves: Counter[int] = Counter()
        self._usage: Usage | None = None  # as of the last delta, once somebody has asked
        self._replicas: dict[int, list[str]] = {}
        self._counted: Sequence[int] = ()  # of each part, that are to be computed again
        self.entered_at = clock()

    def of(self, parts: Collection[int]) -> RunStats:
        """What these parts of the request alone came to so far."""
        own = RunStats(self._clock)
        own.entered_at = self.entered_at
        own._prompts = {part: each for part, each in self._prompts.items() if part in parts}
        own._num_moves = Counter({part: count for part, count in self._num_moves.items() if part in parts})
        return own

    def place(self, parts: Iterable[int], replica_id: str) -> None:
        """Note that these are given to this replica."""
        for part in parts:
            self._replicas.setdefault(part, []).append(replica_id)

    @property
    def parts(self) -> Iterator[tuple[int, PromptStats, Sequence[str]]]:
        """What each came to of which something was heard, with the replicas that it was given to, the last one last."""
        for part, prompt in sorted(self._prompts.items()):
            yield part, prompt, self._replicas.get(part, ())

    @property
    def given(self) -> Collection[int]:
        """Parts that a replica was given."""
        return self._replicas.keys()

    @property
    def unheard(self) -> list[int]:
        """Parts that a replica was given and has not said of how long their prompts are."""
        prompts = self._prompts
        return [part for part in self._replicas if part not in prompts or prompts[part].report is None]

    def elapsed_s(self, part: int) -> float:
        """Return how long ago the first delta of a part came; 0 where none has."""
        prompt = self._prompts.get(part)
        return 0.0 if prompt is None or prompt.first_at is None else self._clock() - prompt.first_at

    def untold(self, part: int, *, n: int, most: int) -> int:
        """Return how many tokens may have been computed since unfinished completions were last reported.

        The pace so far gives the number. If that is unknown, it is all that is left of `most`.
        """
        prompt = self._prompts.get(part)
        if prompt is None or prompt.first_at is None or prompt.last_at is None or prompt.finish_reasons.total() >= n:
            return 0
        left, elapsed = max(0, most - prompt.num_completion_tokens), prompt.last_at - prompt.first_at
        if elapsed <= 0:
            return left
        return min(left, math.ceil(prompt.num_completion_tokens * (self._clock() - prompt.last_at) / elapsed))

    @property
    def num_generated(self) -> int:
        return sum(each.num_generated for each in self._prompts.values())

    @property
    def num_moves(self) -> int:
        return self._num_moves.total()

    @property
    def shown_at(self) -> tuple[float, float]:
        """When the first and the last event came; when it began, where none did."""
        firsts = [each.first_at for each in self._prompts.values() if each.first_at is not None]
        lasts = [each.last_at for each in self._prompts.values() if each.last_at is not None]
        return (min(firsts), max(lasts)) if firsts else (self.entered_at, self.entered_at)

    @property
    def waits(self) -> tuple[float, float]:
        """Seconds that the prompt waited which waited longest, and those to the first event without them."""
        queue_s = max(self.queue_s, default=0.0)
        return queue_s, max(0.0, self.shown_at[0] - self.entered_at - queue_s)

    def token_s(self, num_sequences: int) -> float | None:
        """Return the mean seconds between two tokens of a sequence; None where none has two."""
        (first_at, last_at), num_further = self.shown_at, self.usage.completion_tokens - num_sequences
        return (last_at - first_at) * num_sequences / num_further if num_further > 0 else None

    @property
    def usage(self) -> Usage:
        """So far; a choice that has not ended counts with the tokens it has."""
        if self._usage is None:
            self._usage = self._added_up()
        return self._usage

    @property
    def past(self) -> Usage:
        """What of it another run had told."""
        known = [each for each in self._prompts.values() if each.past is not None]
        reports = [each.report for each in known if each.report is not None]
        return Usage(
            prompt_tokens=sum(report.num_tokens for report in reports),
            cached_tokens=sum(report.num_cached_tokens for report in reports),
            completion_tokens=sum(min(each.past or 0, each.num_completion_tokens) for each in known),
        )

    def _added_up(self) -> Usage:
        reports = self._reports
        return Usage(
            prompt_tokens=sum(report.num_tokens for report in reports),
            cached_tokens=sum(report.num_cached_tokens for report in reports),
            completion_tokens=sum(each.num_completion_tokens for each in self._prompts.values()),
            truncated_tokens=sum(report.num_dropped_tokens for report in reports),
            predicted=_added([each.predicted for each in self._prompts.values()]),
            unenforced_formats=next((each.unenforced_formats for each in reports if each.unenforced_formats), ()),
        )

    @property
    def finish_reasons(self) -> Mapping[FinishReason, int]:
        return sum((each.finish_reasons for each in self._prompts.values()), Counter[FinishReason]())

    @property
    def num_finished(self) -> int:
        """Choices that have ended."""
        return sum([each.finish_reasons.total() for each in self._prompts.values()])

    @property
    def engine_ns(self) -> int:
        """Of the engines' steps, for choices that have ended."""
        return sum(each.engine_ns for each in self._prompts.values())

    @property
    def queue_s(self) -> list[float]:
        """Of each prompt, from its arrival at a replica to the step that took it in."""
        return [report.queue_s for report in self._reports]

    @property
    def timings(self) -> Timings:
        """As of the last delta."""
        first_at, last_at = self.shown_at
        usage = self.usage
        return Timings(
            num_cached_tokens=usage.cached_tokens,
            num_prompt_tokens=usage.prompt_tokens - usage.cached_tokens,
            num_predicted_tokens=usage.completion_tokens,
            prompt_s=first_at - self.entered_at,
            predicted_s=last_at - first_at,
        )

    def note(self, delta: Delta, *, part: int, index: int) -> int:
        """Count a delta that is no error; return the tokens of its choice so far.

        The finish of a choice knows also tokens that no delta carried.
        """
        self._usage = None
        prompt = self._prompts.get(part) or self._begun(part)
        prompt.last_at = self._clock()
        if prompt.first_at is None:
            prompt.first_at = prompt.last_at
        prompt.num_generated += len(delta.token_ids)
        if self.excerpts is not None:
            self.excerpts.note(delta.text, index=index)
        if delta.prompt is not None:
            prompt.report = delta.prompt
        before = prompt.completion_tokens.get(index, 0)
        now = before + len(delta.token_ids) if delta.finish is None else delta.finish.num_tokens
        prompt.completion_tokens[index] = now
        prompt.num_completion_tokens += now - before
        if delta.finish is not None:
            prompt.finish_reasons[delta.finish.reason] += 1
            prompt.engine_ns += delta.finish.engine_ns
            prompt.predicted = _added([prompt.predicted, delta.finish.predicted])
        return now

    def note_past(self, counted: Sequence[int]) -> None:
        """All that was noted so far was told, and is counted, elsewhere.

        counted: of each part the tokens for which that holds, too, and which are to be computed again
        """
        self._counted = counted
        for prompt in self._prompts.values():
            prompt.past, prompt.num_generated = prompt.num_completion_tokens, 0

    def _begun(self, part: int) -> PromptStats:
        past = self._counted[part] or None if self._counted else None
        return self._prompts.setdefault(part, PromptStats(past=past))

    def note_move(self, part: int) -> None:
        """Note that a part was lost, and is given to another replica."""
        self._num_moves[part] += 1

    def note_pause(self, part: int, lost_at: float) -> None:
        """Note that something new of a part has come, for the first time since it was lost."""
        self._prompts.setdefault(part, PromptStats()).pauses.append((lost_at, self._clock()))

    @property
    def pauses_s(self) -> list[float]:
        """Of each move, seconds until something new came."""
        return [ended - begun for prompt in self._prompts.values() for begun, ended in prompt.pauses]

    @property
    def _reports(self) -> list[PromptReport]:
        return [each.report for each in self._prompts.values() if each.report is not None]


def _added(counts: Sequence[tuple[int, int] | None]) -> tuple[int, int] | None:
    """Of those that are known; None where none is."""
    known = [each for each in counts if each is not None]
    return (sum(each[0] for each in known), sum(each[1] for each in known)) if known else None


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
        self._completions: dict[int, _Text] = {}

    def note(self, text: str, *, index: int) -> None:
        """More of a completion."""
        if index in self._completions or len(self._completions) < MAX_TEXTS:
            self._completions.setdefault(index, _Text()).add(text)

    def facts(self) -> dict[str, object]:
        """The texts, keys in them hidden, each with its length in characters."""
        return {
            "prompts": [text.facts() for text in self._prompts],
            "completions": [{"index": index, **text.facts()} for index, text in sorted(self._completions.items())],
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
