"""Times and counts of a response come from its events."""

from __future__ import annotations

from serve_app.core.delta import Delta, Finish, FinishReason, PromptReport
from serve_app.router.run import Event
from serve_app.router.stopwatch import Stopwatch


def event(sample: int = 0, *, tokens: int = 1, prompt: PromptReport | None = None, finish: Finish | None = None):
    delta = Delta(request_id="a", sample=sample, token_ids=(5,) * tokens, prompt=prompt, finish=finish)
    return Event(index=sample, prompt_index=0, delta=delta)


def test_timings_tell_the_prompt_from_what_follows():
    times = iter([10.0, 12.0, 13.0, 16.0])
    stopwatch = Stopwatch(clock=lambda: next(times))
    stopwatch.note(event(prompt=PromptReport(num_tokens=8, num_cached_tokens=3)))
    stopwatch.note(event())
    stopwatch.note(event(tokens=0, finish=Finish(reason=FinishReason.STOP, matched_stop=2, num_tokens=4)))
    assert stopwatch.timings.body() == {
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


def test_nothing_is_divided_by_zero():
    body = Stopwatch(clock=lambda: 7.0).timings.body()
    assert set(body.values()) == {0}
