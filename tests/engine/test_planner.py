"""Prompt work beside decoding sequences follows what it was seen to cost."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import pytest

from serve_app.core.request import SamplingParams
from serve_app.engine.scheduler.planner import (
    FIRST_TOKENS,
    LEAST_TOKENS,
    LOOK_AGAIN,
    LOOK_SELDOM,
    MOST_GROWTH,
    MOST_HURRY,
    SHORT_PROMPT,
    Beyond,
    Pace,
    reasons_to_hurry,
    short_and_unwatched,
    work_clock,
)
from serve_app.engine.scheduler.sequence import Batch, Sequence
from tests.engine.conftest import DEMO
from tests.engine.harness import config, make_engine, request, sequences
from tests.engine.sampling_reference import row


def settle(pace: Pace, *, decode_s: float, token_s: float, fixed_s: float = 0.0, rounds: int = 60) -> int:
    """Make steps on a machine of these costs until the allowance has settled; any number of rows costs the same."""
    for rows in (1, 2, 4, 16, 64):
        pace.note(rows, 0, decode_s)
    for _ in range(rounds):
        pace.note(8, 0, decode_s)
        allowed = pace.allowance(8, 100_000)
        pace.note(8, allowed, decode_s + fixed_s + token_s * allowed)
    return pace.allowance(8, 100_000)


def test_without_decoding_sequences_the_whole_budget_is_allowed() -> None:
    assert Pace(1.5).allowance(0, 512) == 512


@pytest.mark.parametrize(("decode_s", "token_s"), [(0.150, 0.0012), (0.008, 0.00005), (0.100, 0.01)])
def test_a_step_with_prompt_work_takes_no_longer_than_its_stretch(decode_s: float, token_s: float) -> None:
    allowed = settle(Pace(1.75), decode_s=decode_s, token_s=token_s)
    expected = max(LEAST_TOKENS, 0.75 * decode_s / token_s)
    assert allowed == pytest.approx(expected, rel=0.15)


def test_a_fixed_cost_of_prompt_work_does_not_starve_it() -> None:
    allowed = settle(Pace(1.75), decode_s=0.010, token_s=0.00005, fixed_s=0.003)
    assert allowed == pytest.approx((0.0075 - 0.003) / 0.00005, rel=0.2)


def test_a_step_with_little_prompt_work_says_nothing_of_more() -> None:
    pace = Pace(2.0)
    before = settle(pace, decode_s=0.1, token_s=0.001)
    for _ in range(20):
        pace.note(8, 3, 0.1001)
    assert pace.allowance(8, 100_000) == before


def test_one_slow_step_does_not_stop_prompts() -> None:
    pace = Pace(2.0)
    before = settle(pace, decode_s=0.1, token_s=0.001)
    pace.note(8, before, 30.0)
    assert pace.allowance(8, 100_000) >= before / 2


def test_something_is_always_allowed() -> None:
    pace = Pace(1.1)
    settle(pace, decode_s=0.001, token_s=1.0)
    assert pace.allowance(64, 512) >= 1


def test_the_allowance_grows_so_slowly_that_no_step_takes_much_more_than_its_stretch() -> None:
    pace = Pace(1.75)
    longest = 0.0
    for _ in range(60):
        pace.note(8, 0, 0.010)
        allowed = pace.allowance(8, 100_000)
        longest = max(longest, 0.010 + 0.0001 * allowed)
        pace.note(8, allowed, 0.010 + 0.0001 * allowed)
    assert longest <= 0.010 * (1 + 0.75 * MOST_GROWTH)


def test_several_short_prompts_hurry_and_one_or_long_ones_do_not() -> None:
    pace = Pace(1.75)
    alone = settle(pace, decode_s=0.2, token_s=0.001)

    def allowed(*behind: int, rows: int) -> int:
        return pace.allowance(rows, 100_000, behind=behind)

    assert allowed(rows=1) == allowed(9, rows=16) == allowed(9, 9, rows=64) == alone
    assert allowed(*[16 * SHORT_PROMPT] * 3, rows=8) == alone
    assert allowed(*[9] * 2, rows=8) == allowed(*[9] * 2, rows=16) == pytest.approx(2 * alone, abs=2)
    assert allowed(*[9] * 3, rows=16) == allowed(*[2 * SHORT_PROMPT] * 6, rows=16) == pytest.approx(3 * alone, abs=6)
    assert allowed(*[9] * 6, rows=64) == pytest.approx(3 * alone, abs=3)
    assert allowed(*[9] * 6, rows=1) == allowed(*[9] * 500, rows=1) == pytest.approx(MOST_HURRY * alone, abs=8)


def test_who_waits_for_nothing_is_stretched_for_one_prompt_of_each_other_behind_the_first() -> None:
    def of(flow: str, prompt: int) -> Sequence:
        sequence = row(SamplingParams(), prompt=range(prompt))
        sequence.request = replace(sequence.request, share=replace(sequence.request.share, flow=flow))
        return sequence

    prompts = [of("a", 9), of("b", 20), of("a", 30)]
    assert reasons_to_hurry(prompts, [of("a", 2), of("b", 2)]) == [20, 30]
    assert reasons_to_hurry(prompts, [of("a", 2), of("c", 2)]) == [20]
    assert reasons_to_hurry([of("a", 9)] * 50, [of("c", 2)]) == [], "nobody hurries others with all that it sends"
    assert reasons_to_hurry([of(each, 9) for each in "abde"], [of("c", 2)]) == [9, 9, 9]
    assert reasons_to_hurry(prompts, []) == [20, 30]


def test_short_prompts_wait_for_none_of_their_flow_that_nobody_reads() -> None:
    def of(flow: str, prompt: int, *, is_read_whole: bool = True) -> Sequence:
        sequence = row(SamplingParams(), prompt=range(prompt))
        share = replace(sequence.request.share, flow=flow)
        sequence.request = replace(sequence.request, share=share, is_read_whole=is_read_whole)
        return sequence

    prompts = [of("a", 9), of("a", SHORT_PROMPT), of("a", SHORT_PROMPT + 1), of("a", 20, is_read_whole=False)]
    assert short_and_unwatched(prompts, [of("a", 2), of("a", 2)]) == 9 + SHORT_PROMPT + 20
    assert short_and_unwatched(prompts, [of("a", 2), of("a", 2, is_read_whole=False)]) == 0
    assert short_and_unwatched(prompts, [of("a", 2), of("b", 2)]) == 0
    assert short_and_unwatched([*prompts, of("b", 2)], [of("a", 2)]) == 0


@pytest.mark.parametrize("is_read_whole", [True, False])
def test_prompts_of_a_request_that_is_read_at_its_end_are_computed_at_once(is_read_whole: bool) -> None:
    engine = make_engine(config(DEMO, max_batch_tokens=128))
    sizes: list[int] = []
    schedule = engine._scheduler.schedule

    def counted() -> Batch:
        batch = schedule()
        sizes.append(batch.num_prompt_tokens)
        return batch

    engine._scheduler.schedule = counted  # type: ignore[method-assign]
    for number in range(8):
        asked = replace(request(f"p{number}", max_tokens=40), is_read_whole=is_read_whole)
        engine.add(sequences(engine, asked, list(range(20 + number, 80 + number))))
    while engine.has_work:
        engine.step()
    assert sum(sizes) == 8 * 60
    assert (sizes[:4] == [128, 126, 124, 102]) == is_read_whole, "all that fits beside two, four and six that decode"
    engine.close()


def test_steps_in_a_hurry_change_nothing_for_those_after_them() -> None:
    pace = Pace(1.75)
    alone = settle(pace, decode_s=0.2, token_s=0.001)
    for _ in range(30):
        allowed = pace.allowance(1, 100_000, behind=[9] * 6)
        pace.note(1, allowed, 0.2 + 0.001 * allowed)
    assert pace.allowance(8, 100_000) == pytest.approx(alone, rel=0.05)


@pytest.mark.parametrize("rows", [1, 12])
def test_before_a_step_of_a_size_was_seen_without_prompts_one_is_made(rows: int) -> None:
    pace = Pace(1.75)
    pace.note(5, 0, 0.2)
    assert pace.allowance(rows, 512, behind=[9] * 6) == 0
    pace.note(rows, 0, 0.2)
    assert pace.allowance(rows, 512, behind=[9] * 6) >= LEAST_TOKENS


def test_many_rows_are_not_judged_by_what_a_step_with_fewer_takes() -> None:
    """A step of 28 rows takes half as long again as one of 17, and none of that is the cost of its prompts."""

    def decode_s(rows: int) -> float:
        return 0.050 + 0.003 * rows

    pace = Pace(2.0)
    pace.note(17, 0, decode_s(17))
    for _ in range(25):
        allowed = pace.allowance(28, 100_000)
        pace.note(28, allowed, decode_s(28) + 0.002 * allowed)
    assert pace.allowance(28, 100_000) >= 0.9 * decode_s(28) / 0.002


def test_a_machine_that_became_slower_is_seen_though_prompts_never_end() -> None:
    """Else all that a step takes beyond the former estimate would pass for the cost of its prompts."""
    pace = Pace(1.75)
    before = settle(pace, decode_s=0.1, token_s=0.001)
    for _ in range(400):
        allowed = pace.allowance(8, 100_000)
        pace.note(8, allowed, 0.3 + 0.003 * allowed)
    assert max(pace.allowance(8, 100_000) for _ in range(2)) == pytest.approx(before, rel=0.15)


def test_prompts_that_come_with_the_first_are_paced_by_what_a_step_costs() -> None:
    """Nobody decodes alone between them, so nothing would be known of a step without prompts until all are in."""
    engine = make_engine(config(DEMO, max_batch_tokens=512, max_step_stretch=1.75))
    now = [0.0]
    engine._work_clock = lambda: now[0]
    forward = engine._runner.forward

    def counted(batch):  # type: ignore[no-untyped-def]
        now[0] += 0.2 + 0.001 * batch.num_prompt_tokens
        return forward(batch)

    engine._runner.forward = counted  # type: ignore[method-assign]
    engine.add(sequences(engine, request("first", max_tokens=60), list(range(20, 30))))
    engine.step()
    for number in range(7):
        engine.add(sequences(engine, request(f"p{number}", max_tokens=60), list(range(20 + number, 140 + number))))
    num_steps = 0
    while any(each.num_computed < each.prompt_length for each in engine._scheduler.running) or not num_steps:
        engine.step()
        num_steps += 1
    assert num_steps <= 20  # 840 tokens at 16 a step are 53
    engine.abort(frozenset(["first", *(f"p{number}" for number in range(7))]))
    engine.close()


def test_on_a_cpu_time_in_which_a_thread_does_not_compute_is_no_work_of_its_step() -> None:
    clock = work_clock("cpu")
    before = clock()
    time.sleep(0.2)
    assert clock() - before < 0.1
    assert work_clock("cuda") is time.perf_counter


def test_prompt_work_beside_a_stream_is_paced_by_the_work_clock() -> None:
    engine = make_engine(config(DEMO, max_batch_tokens=512, max_step_stretch=1.5))
    now = [0.0]
    engine._work_clock = lambda: now[0]
    sizes: list[int] = []
    forward = engine._runner.forward

    def counted(batch):  # type: ignore[no-untyped-def]
        now[0] += 0.010 + 0.001 * batch.num_prompt_tokens  # at this price five tokens would fit, and the least is 8
        if batch.num_decoding:
            sizes.append(batch.num_prompt_tokens)
        return forward(batch)

    engine._runner.forward = counted  # type: ignore[method-assign]
    engine.add(sequences(engine, request("stream", max_tokens=40), [50, 60, 70]))
    for _ in range(4):
        engine.step()
    engine.add(sequences(engine, request("long", max_tokens=1), list(range(20, 220))))
    while engine.has_work:
        engine.step()
    first, *later = [size for size in sizes if size]
    assert first == FIRST_TOKENS, "nobody knows yet what they cost"
    assert max(later) == LEAST_TOKENS
    engine.close()


@pytest.mark.parametrize("least", [1, 8, 64])
def test_prompts_get_on_by_the_least_that_is_configured_however_dear_they_are(least: int) -> None:
    assert settle(Pace(1.75, least), decode_s=0.010, token_s=1.0) == least


@pytest.mark.parametrize("is_known", [False, True])
def test_rows_of_others_get_on_though_no_step_shows_what_one_without_them_takes(is_known: bool) -> None:
    """As where the last token of some prompt is in every step."""
    pace = Pace(1.75)
    if is_known:
        pace.note(4, 0, 0.04)
    allowed = []
    for _ in range(200):
        allowed.append(pace.rows(4, 60))
        pace.note(4 + allowed[-1], 1, 0.04, beyond=Beyond(allowed[-1], 2))
    assert sum(each == 0 for each in allowed[100:]) <= 100 / 8 + 1
    assert max(allowed[100:]) > 0


def test_what_a_step_takes_without_rows_of_others_is_told_by_none_with_them() -> None:
    """Though both are of one size: 16 rows that all have, and up to seven more."""

    def step_s(rows: int) -> float:
        return 0.032 + 0.0021 * rows

    pace, took_s = Pace(1.75), []
    for _ in range(2 * LOOK_AGAIN * LOOK_SELDOM):
        num_beyond = pace.rows(16, 16)
        took_s.append(step_s(16 + num_beyond))
        pace.note(16 + num_beyond, 0, took_s[-1], beyond=Beyond(num_beyond, 8))
    assert statistics.median(took_s[LOOK_AGAIN:]) == pytest.approx(1.375 * step_s(16), rel=0.04)


def test_rows_of_others_may_make_of_a_step_what_prompts_might_of_the_least_flows() -> None:
    def step_s(rows: int) -> float:
        return 0.032 + 0.0021 * rows

    pace, took_s = Pace(1.75), []
    for _ in range(400):
        num_beyond = pace.rows(2, 62)
        took_s.append(step_s(2 + num_beyond))
        pace.note(2 + num_beyond, 0, took_s[-1], beyond=Beyond(num_beyond, 1))
    assert statistics.median(took_s[100:]) == pytest.approx(1.75 * step_s(1), rel=0.08)
