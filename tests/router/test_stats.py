"""Times and counts of a run come from its deltas, and lost attempts leave only what they had computed."""

from __future__ import annotations

import random

from serve_app.core.delta import Delta, Finish, FinishReason, PromptReport, Usage
from serve_app.router.stats import RunStats


def delta(*, tokens: int = 1, prompt: PromptReport | None = None, finish: Finish | None = None) -> Delta:
    return Delta(request_id="a", sample=0, token_ids=(5,) * tokens, prompt=prompt, finish=finish)


def ticking(*times: float) -> RunStats:
    left = iter(times)
    return RunStats(clock=lambda: next(left))


STOP = FinishReason.STOP


def test_timings_tell_the_prompt_from_what_follows() -> None:
    stats = ticking(10.0, 12.0, 13.0, 16.0)
    stats.note(delta(prompt=PromptReport(num_tokens=8, num_cached_tokens=3)), part=0, index=0)
    stats.note(delta(), part=0, index=0)
    stats.note(delta(tokens=0, finish=Finish(reason=STOP, matched_stop=2, num_tokens=4)), part=0, index=0)
    assert stats.timings.body() == {
        "cache_n": 3,
        "prompt_n": 5,
        "prompt_ms": 2000.0,
        "prompt_per_token_ms": 400.0,
        "prompt_per_second": 2.5,
        "predicted_n": 4,
        "predicted_ms": 4000.0,
        "predicted_per_token_ms": 1000.0,
        "predicted_per_second": 1.0,
    }


def test_nothing_is_divided_by_zero() -> None:
    assert set(ticking(7.0).timings.body().values()) == {0}


def test_each_delta_tells_the_tokens_of_its_choice_so_far_and_the_finish_corrects_them() -> None:
    stats = RunStats()
    finish = Finish(reason=STOP, matched_stop=None, num_tokens=4)
    counts = [stats.note(delta(tokens=2), part=0, index=1) for _ in range(2)]
    assert counts == [2, 4]
    assert stats.note(delta(tokens=3, finish=finish), part=0, index=1) == 4
    assert stats.usage.completion_tokens == 4
    assert stats.num_generated == 7


def test_a_move_takes_nothing_back_and_its_pause_ends_with_the_next_news() -> None:
    now = 10.0
    stats = RunStats(lambda: now)
    report = PromptReport(num_tokens=8, num_cached_tokens=3, queue_s=0.5)
    finish = Finish(reason=STOP, matched_stop=None, num_tokens=5)
    stats.note(delta(tokens=5, prompt=report, finish=finish), part=0, index=0)
    stats.note(delta(tokens=1, prompt=report), part=1, index=1)
    stats.note_move(1)
    now = 12.5
    stats.note_pause(1, 11.0)
    assert stats.usage == Usage(prompt_tokens=16, completion_tokens=6, cached_tokens=6)
    assert (stats.num_generated, stats.num_moves, stats.num_finished) == (6, 1, 1)
    assert (stats.queue_s, stats.pauses_s) == ([0.5, 0.5], [1.5])


def test_parts_that_a_replica_was_given_are_unheard_until_it_tells_of_their_prompts() -> None:
    stats = RunStats()
    stats.place([0, 1, 2], "r0")
    stats.note(delta(tokens=1, prompt=PromptReport(num_tokens=8, num_cached_tokens=3)), part=1, index=1)
    stats.note(delta(tokens=1), part=2, index=2)
    assert stats.unheard == [0, 2]


def test_what_was_computed_and_not_told_is_reckoned_by_the_pace_of_what_was() -> None:
    now = 10.0
    stats = RunStats(lambda: now)
    report = PromptReport(num_tokens=8, num_cached_tokens=3)
    assert stats.untold(0, n=2, most=100) == 0, "nobody has told of the prompt"
    for index in range(2):
        stats.note(delta(tokens=1, prompt=report), part=0, index=index)
    now = 10.1
    assert stats.untold(0, n=2, most=100) == 98, "it has no pace"
    now = 11.0
    stats.note(delta(tokens=38), part=0, index=0)
    assert stats.untold(0, n=2, most=100) == 0
    now = 11.5
    assert stats.untold(0, n=2, most=100) == 20, "40 a second"
    now = 99.0
    assert stats.untold(0, n=2, most=100) == 60
    for index in range(2):
        stats.note(delta(tokens=1, finish=Finish(reason=STOP, matched_stop=None, num_tokens=20)), part=0, index=index)
    now = 199.0
    assert stats.untold(0, n=2, most=100) == 0, "both have ended"


def test_usage_is_added_up_once_for_all_who_ask_between_two_deltas_and_is_never_an_old_one() -> None:
    """Whatever was noted and moved: it is what one says that has heard it all and was never asked."""
    drawn, stats = random.Random(3), RunStats(lambda: 0.0)
    for number in range(200):
        part, tokens = drawn.randrange(3), drawn.randrange(4)
        if drawn.random() < 0.1:
            stats.note_move(part)
        else:
            report = PromptReport(num_tokens=number, num_cached_tokens=1) if drawn.random() < 0.3 else None
            stats.note(Delta(request_id="r", sample=0, token_ids=(1,) * tokens, prompt=report), part=part, index=part)
        assert stats.usage == stats.of(range(3)).usage
        assert stats.usage is stats.usage
