"""What is taken of an attempt that was lost and of one that goes on is what one that was never disturbed tells."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.delta import Delta, Finish, FinishReason, PromptReport, TokenLogprob, TopLogprob
from serve_app.core.names import ModelRef
from serve_app.core.progress import MAX_KEPT_SCORES, Progress
from serve_app.core.prompt import Prompt
from serve_app.core.request import Continued, GenerationRequest, Kept, LogprobParams


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


def test_of_a_stream_with_many_scores_no_more_than_tokens_is_remembered() -> None:
    request = asked(n=2, logprobs=LogprobParams(top=1))
    models = (request.model, request.model)
    kept = Kept(created=0, owner="a", path="/v1/chat", dialect="union", body=b"", seed=1, models=models, seconds=9)
    request = replace(request, kept=kept)
    progress = Progress(request)
    top = (TopLogprob(token_id=6, text="", logprob=-1.0),)
    entry = TokenLogprob(token_id=5, text="", logprob=-1.0, offset=0, top=top)
    for number in range(MAX_KEPT_SCORES // 4):
        assert progress.is_kept
        progress.take(Delta(request_id="a", sample=number % 2, text="x", token_ids=(5,), logprobs=(entry,)))
    again = progress.go_on(request)
    assert (again.kept, sum(len(each.logprobs) for each in again.past)) == (kept, MAX_KEPT_SCORES // 4)
    news = progress.take(Delta(request_id="a", sample=0, text="y", token_ids=(7,), logprobs=(entry,)))
    assert (news is not None, progress.is_kept, len(progress.past[0].logprobs)) == (True, False, 0)
    again = progress.go_on(request)
    assert (again.kept, again.past) == (None, ())
    assert again.continued[0] == Continued(
        token_ids=(*(5,) * (MAX_KEPT_SCORES // 8), 7), num_counted=MAX_KEPT_SCORES // 8 + 1
    )


def test_what_was_counted_before_it_was_lost_is_not_counted_at_the_third_replica_either() -> None:
    request = replace(asked(n=2), continued=(Continued(num_counted=10), Continued(num_counted=1)))
    progress = Progress(request)
    assert progress.go_on(request) == request, "nothing is told yet"
    for sample in range(2):
        progress.take(Delta(request_id="a", sample=sample, text="ab", token_ids=(1, 2)))
    again = progress.go_on(request)
    assert [each.num_counted for each in again.continued if each is not None] == [10, 2]
