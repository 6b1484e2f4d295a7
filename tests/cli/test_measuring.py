"""What a load and two looks at the metrics come to, in numbers that can be checked by hand."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from serve_app.cli.bench import Answer, Load, in_turns, quantile, report
from serve_app.cli.client import Service
from serve_app.cli.screen import common_length
from serve_app.cli.top import board, drawn, read_look

BEFORE = """\
# TYPE serve_app_replica_steps_total counter
serve_app_replica_steps_total{router="r",model="demo",replica="a"} 10
serve_app_replica_step_seconds_total{router="r",model="demo",replica="a"} 1.0
serve_app_replica_blocks{router="r",model="demo",replica="a"} 100
serve_app_replica_blocks_free{router="r",model="demo",replica="a"} 100
serve_app_replica_flow_seconds_total{router="r",model="demo",replica="a",flow="acme"} 1.0
serve_app_replica_flow_seconds_total{router="r",model="demo",replica="a",flow="*"} 1.0
serve_app_replica_flow_generated_tokens_total{router="r",model="demo",replica="a",flow="acme"} 100
"""
AFTER = """\
serve_app_replica_steps_total{router="r",model="demo",replica="a"} 30
serve_app_replica_step_seconds_total{router="r",model="demo",replica="a"} 2.0
serve_app_replica_blocks{router="r",model="demo",replica="a"} 100
serve_app_replica_blocks_free{router="r",model="demo",replica="a"} 25
serve_app_replica_sequences_running{router="r",model="demo",replica="a"} 3
serve_app_replica_flow_seconds_total{router="r",model="demo",replica="a",flow="acme"} 1.75
serve_app_replica_flow_seconds_total{router="r",model="demo",replica="a",flow="*"} 1.25
serve_app_replica_flow_generated_tokens_total{router="r",model="demo",replica="a",flow="acme"} 150
serve_app_prompt_tokens_total{router="r",model="demo"} 40
serve_app_cached_tokens_total{router="r",model="demo"} 10
serve_app_admission_predicted_wait_seconds{router="r",model="demo"} 2.5
serve_app_model_replicas{router="r",model="demo",state="wanted"} 3
serve_app_model_replicas{router="r",model="demo",state="starting"} 2
serve_app_model_replicas{router="r",model="demo",state="draining"} 0
"""


def test_rates_are_of_the_time_between_two_looks() -> None:
    seen = board(read_look(BEFORE, 0.0), read_look(AFTER, 2.0))
    (replica,) = seen.replicas
    assert (replica.model, replica.running, replica.steps_per_s, replica.busy) == ("demo", 3, 10.0, 0.5)
    assert replica.blocks_used == 0.75
    assert [(each.tenant, each.share) for each in seen.tenants] == [("acme", 0.75), ("all others", 0.25)]
    assert seen.tenants[0].generated_per_s == seen.generated_per_s == 25.0
    assert (seen.cached_share, seen.waits_s) == (0.25, {"demo": 2.5})
    console = Console(file=StringIO(), width=120)
    console.print(drawn(seen, "http://here"))
    assert isinstance(console.file, StringIO)
    assert "demo: 1 of 3 replicas, 2 starting\n" in console.file.getvalue().replace("  ", "")


def test_two_looks_at_two_routers_have_no_gain_between_them() -> None:
    other = AFTER.replace('router="r"', 'router="s"')
    seen = board(read_look(BEFORE, 0.0), read_look(other, 1.0))
    assert (seen.generated_per_s, seen.prompt_per_s) == (0.0, 0.0)
    assert (seen.replicas[0].steps_per_s, seen.replicas[0].busy) == (0.0, 0.0)
    assert {each.generated_per_s for each in seen.tenants} == {0.0}
    back = board(read_look(BEFORE, 0.0), read_look(AFTER + other, 2.0))
    assert back.generated_per_s == 25.0, "what both looks have is told as it is"
    assert (back.replicas[0].steps_per_s, back.tenants[0].share) == (10.0, 0.75)


def test_a_counter_that_began_anew_has_gained_nothing() -> None:
    seen = board(read_look(AFTER, 0.0), read_look(BEFORE, 1.0))
    assert seen.replicas[0].steps_per_s == 0.0
    assert seen.generated_per_s == 0.0


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


@dataclass(frozen=True, kw_only=True)
class Noting(Service):
    """A service that notes which model it was asked for."""

    asked: list[str] = field(default_factory=list)

    def events(self, path: str, body: Mapping[str, object]) -> Generator[dict[str, Any]]:
        self.asked.append(str(body["model"]))
        yield {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}


@pytest.mark.parametrize(
    ("models", "turns"),
    [("a", "a" * 20), ("ab", "aaabbbbbbaaaaaabbbbbbaaaaaabbbbbbaaaaabb")],
)
def test_of_two_models_one_is_asked_at_a_time_and_each_is_first_as_often(models: str, turns: str) -> None:
    load, noting = Load(num_clients=3, num_requests=20, max_tokens=2, num_words=2), Noting(url="")
    measured = in_turns(noting, load, [*models], told=lambda: None)
    assert "".join(noting.asked) == turns
    assert [(len(answers), sum(each.output_tokens for each in answers)) for answers, _ in measured] == [(20, 40)] * len(
        models
    )
    assert all(seconds > 0 for _, seconds in measured)


@pytest.mark.parametrize(
    ("texts", "length"), [(["abc", "abd"], 2), (["abc", "ab"], 2), (["x", "y"], 0), (["same", "same"], 4), ([], 0)]
)
def test_texts_are_alike_to_where_two_of_them_part(texts: list[str], length: int) -> None:
    assert common_length(texts) == length
