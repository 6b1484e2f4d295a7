"""What is taken of an attempt that was lost and of one that goes on is what one that was never disturbed tells."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.delta import Delta, Finish, FinishReason, PromptReport, TokenLogprob
from serve_app.core.names import ModelRef
from serve_app.core.progress import Progress
from serve_app.core.prompt import Prompt
from serve_app.core.request import GenerationRequest, LogprobParams


def asked(*, n: int = 1, logprobs: LogprobParams | None = None) -> GenerationRequest:
    return GenerationRequest(
        request_id="a", model=ModelRef(base="tiny"), prompt=Prompt(parts=((1,),)), n=n, logprobs=logprobs
    )


@dataclass
class Told:
    """Everything that was taken, put together."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    num_ends: int = 0
    num_reports: int = 0

    def take(self, delta: Delta | None) -> None:
        if delta is not None:
            self.text += delta.text
            self.token_ids += delta.token_ids
            self.logprobs += delta.logprobs
            self.num_ends += delta.finish is not None
            self.num_reports += delta.prompt is not None


def completion(shape: list[tuple[int, int]], *, scores: bool) -> list[tuple[str, int, TokenLogprob | None]]:
    """Tokens of a completion: the text that each lets be shown, its id, its score. A score is told with text alone."""
    words = []
    for number, (length, token_id) in enumerate(shape):
        entry = TokenLogprob(token_id=token_id, text="", logprob=-1.0, offset=number) if scores else None
        words.append((chr(97 + number % 26) * length, token_id, entry))
    return words


def deltas(words: list[tuple[str, int, TokenLogprob | None]], begin: int, steps: list[int]) -> list[Delta]:
    """What a replica tells that goes on behind the first `begin` tokens, so many tokens in each delta."""
    told, pending, at, is_reported = [], [], begin, begin > 0
    for step in [*steps, *([1] * len(words))]:
        some = words[at : at + step]
        if not some:
            break
        at += len(some)
        text = "".join(word for word, _, _ in some)
        pending += [entry for _, _, entry in some if entry is not None]
        shown, pending = (tuple(pending), []) if text or at == len(words) else ((), pending)
        end = Finish(reason=FinishReason.LENGTH, matched_stop=None, num_tokens=len(words)) if at == len(words) else None
        report = None if is_reported else PromptReport(num_tokens=1, num_cached_tokens=0)
        is_reported = True
        ids = tuple(token_id for _, token_id, _ in some)
        told.append(
            Delta(request_id="a", sample=0, text=text, token_ids=ids, logprobs=shown, prompt=report, finish=end)
        )
    return told


@given(
    shape=st.lists(st.tuples(st.sampled_from([0, 0, 1, 3]), st.integers(1, 2**20)), min_size=1, max_size=12),
    steps=st.lists(st.lists(st.integers(1, 4), max_size=6), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 12), max_size=3),
    scores=st.booleans(),
)
def test_however_often_it_is_cut_each_token_character_and_score_is_told_once(
    shape: list[tuple[int, int]], steps: list[list[int]], cuts: list[int], *, scores: bool
) -> None:
    words, request = completion(shape, scores=scores), asked(logprobs=LogprobParams(top=0) if scores else None)
    progress, told, whole = Progress(request), Told(), Told()
    for delta in deltas(words, 0, []):
        whole.take(delta)
    begin = 0
    for attempt, cut in enumerate([*cuts, 99]):
        for delta in deltas(words, begin, steps[attempt % len(steps)])[:cut]:
            told.take(progress.take(delta))
        if told.num_ends:
            break
        again = progress.go_on(request)
        known = again.continued[0] if again.continued else None
        begin = 0 if known is None else len(known.token_ids)
        assert known is None or known.token_ids == whole.token_ids[:begin]
        assert begin <= len(told.token_ids)
        assert scores or begin == len(told.token_ids), "no token is drawn twice where nothing else waits"
    assert told == whole


def test_what_has_not_begun_is_asked_for_as_it_was() -> None:
    request = asked(n=2)
    assert Progress(request).go_on(request) is request


def test_mirostats_bound_is_that_behind_the_tokens_that_are_given_on() -> None:
    request = asked(logprobs=LogprobParams(top=0))
    progress = Progress(request)
    entry = TokenLogprob(token_id=5, text="", logprob=-1.0, offset=0)
    progress.take(Delta(request_id="a", sample=0, text="x", token_ids=(5,), logprobs=(entry,), mu=3.5))
    progress.take(Delta(request_id="a", sample=0, token_ids=(6,), mu=2.5))
    (known,) = progress.go_on(request).continued
    assert known is not None
    assert (known.token_ids, known.mu) == ((5,), 3.5)
