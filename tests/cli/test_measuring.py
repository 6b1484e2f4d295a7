"""What a load comes to, in numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from serve_app.cli.bench import Answer, Load, quantile, report
from serve_app.cli.complete import common_length


def test_a_report_counts_what_failed_and_times_what_did_not() -> None:
    good = Answer(sent_at=0.0, ended_at=1.0, seen_at=[0.25, 0.5, 1.0], output_tokens=3, prompt_tokens=5)
    bad = Answer(sent_at=0.0, ended_at=0.1, error="full")
    found = report([good, bad], model="demo", num_clients=2, seconds=2.0)
    assert (found.num_answered, found.num_failed, found.errors) == (1, 1, {"full": 1})
    assert (found.output_tokens_per_s, found.requests_per_s) == (1.5, 0.5)
    assert (found.first_token_s.p50, found.gap_s.max, found.request_s.p95) == (0.25, 0.5, 1.0)


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [
        ([], 0.5, None), ([3.0], 0.95, 3.0), ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0), ([1.0, 2.0, 3.0], 0.5, 2.0),
        ([*map(float, range(1, 101))], 0.95, 95.0), ([*map(float, range(1, 21))], 0.95, 19.0), ([1.0, 2.0], 0.0, 1.0),
    ],
)  # fmt: skip
def test_a_quantile_is_the_least_value_that_so_many_of_all_are_not_above(
    values: list[float], share: float, found: float | None
) -> None:
    assert quantile(values, share) == found


def test_a_load_is_the_same_every_time_and_no_two_prompts_of_it_begin_alike() -> None:
    load = Load(num_clients=2, num_requests=9, max_tokens=4, num_words=6, parameters={"top_k": 3, "ignore_eos": False})
    bodies = list(load.bodies("demo"))
    assert bodies == list(load.bodies("demo"))
    assert len({str(body["prompt"])[:3] for body in bodies}) == 9
    assert (bodies[0]["top_k"], bodies[0]["ignore_eos"]) == (3, False)


@pytest.mark.parametrize(
    ("texts", "length"), [(["abc", "abd"], 2), (["abc", "ab"], 2), (["x", "y"], 0), (["same", "same"], 4)]
)
def test_texts_are_alike_to_where_two_of_them_part(texts: list[str], length: int) -> None:
    assert common_length(texts) == length
