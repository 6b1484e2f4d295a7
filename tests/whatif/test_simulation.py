"""Simulated traffic: the same every time, and as the policies promise."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.router.admission import AdmissionSettings
from serve_app.whatif.simulation import Service, enough_replicas, simulate
from serve_app.whatif.trace import Asked, Unusable
from tests.whatif.traffic import COSTS, adapters, documents, service

DOCUMENTS = documents(8, times=10, per_s=4.0)


def alone(prompt: int, completion: int) -> list[Asked]:
    return [Asked(at_s=0.0, output_tokens=completion, pieces=(("own", prompt),))]


def test_a_request_alone_takes_what_its_steps_cost() -> None:
    found = simulate(alone(100, 11), service(), num_replicas=1, policy="warm")
    first_s = COSTS.request_s + COSTS.steps + 100 * COSTS.prompt_tokens
    assert found.first_p50 == pytest.approx(first_s)
    assert found.total_p99 == pytest.approx(first_s + 10 * (COSTS.steps + COSTS.rows))
    assert found.tokens_per_s == pytest.approx(11 / (found.total_p99 or 0.0))


def test_a_long_prompt_takes_as_many_steps_as_a_batch_is_short() -> None:
    found = simulate(alone(1000, 1), service(max_batch_tokens=256), num_replicas=1, policy="warm")
    assert found.first_p50 == pytest.approx(COSTS.request_s + 4 * COSTS.steps + 1000 * COSTS.prompt_tokens)


def test_the_same_trace_gives_the_same_outcome() -> None:
    for policy in ("warm", "random"):
        first, second = (simulate(DOCUMENTS, service(), num_replicas=3, policy=policy) for _ in range(2))  # type: ignore[arg-type]
        assert first == second


async def test_where_a_loop_runs_as_in_a_notebook_the_outcome_is_the_same() -> None:
    found = simulate(alone(100, 11), service(), num_replicas=1, policy="warm")
    assert found == await asyncio.to_thread(simulate, alone(100, 11), service(), num_replicas=1, policy="warm")


def test_documents_stay_where_they_are_warm() -> None:
    one = simulate(DOCUMENTS, service(), num_replicas=1, policy="warm")
    warm = simulate(DOCUMENTS, service(), num_replicas=4, policy="warm")
    random = simulate(DOCUMENTS, service(), num_replicas=4, policy="random")
    least = simulate(DOCUMENTS, service(), num_replicas=4, policy="least_work")
    assert one.prefix_hits
    assert warm.prefix_hits
    assert random.prefix_hits
    assert least.prefix_hits
    assert warm.prefix_hits >= 0.9 * one.prefix_hits
    assert warm.prefix_hits > max(random.prefix_hits, least.prefix_hits)
    assert (warm.first_p99 or 9.9) < min(random.first_p99 or 0.0, least.first_p99 or 0.0)


def test_slots_of_replicas_add_up_where_adapters_are_placed() -> None:
    trace = adapters(300, of=24, per_s=20.0)
    settings = service(max_adapters=8)
    warm = simulate(trace, settings, num_replicas=3, policy="warm")
    least = simulate(trace, settings, num_replicas=3, policy="least_work")
    assert warm.num_served == least.num_served == 300
    assert (warm.adapter_hits or 0.0) > (least.adapter_hits or 0.0)


def test_a_full_service_refuses_by_the_admission_of_routers() -> None:
    settings = service(max_num_sequences=4, max_waiting=2)
    crowd = [Asked(at_s=0.0, output_tokens=64, pieces=((f"own {at}", 64),)) for at in range(50)]
    found = simulate(crowd, settings, num_replicas=1, policy="warm")
    assert (found.num_served, found.num_refused) == (6, 44)
    patient = simulate(crowd, settings, num_replicas=10, policy="warm")
    assert patient.num_refused == 0


def test_who_would_wait_too_long_is_refused() -> None:
    crowd = [Asked(at_s=at / 10, output_tokens=200, pieces=((f"own {at}", 64),)) for at in range(400)]
    impatient = Service(
        config=service(max_num_sequences=4).config, costs=COSTS, admission=AdmissionSettings(max_wait_s=2.0)
    )
    found = simulate(crowd, impatient, num_replicas=1, policy="warm")
    assert found.num_refused > 0
    assert found.num_served + found.num_refused == 400


def test_what_can_never_begin_is_refused() -> None:
    too_long = [*alone(COSTS.num_blocks * 16, 1), *DOCUMENTS[:1]]
    found = simulate(too_long, service(), num_replicas=1, policy="warm")
    assert (found.num_served, found.num_refused) == (1, 1)


def test_the_fewest_replicas_are_found_that_keep_a_target() -> None:
    found = enough_replicas(DOCUMENTS, service(), policy="warm", target_p99_s=1.5)
    assert (found.first_p99 or 9.9) <= 1.5
    fewer = simulate(DOCUMENTS, service(), num_replicas=found.num_replicas - 1, policy="warm")
    assert (fewer.first_p99 or 0.0) > 1.5


def test_a_target_that_no_number_keeps_is_said_to_be_one() -> None:
    with pytest.raises(Unusable, match=r"no number of replicas keeps a p99 of 0\.01 s"):
        enough_replicas(DOCUMENTS, service(), policy="warm", target_p99_s=0.01)


@pytest.mark.slow
def test_a_thousand_replicas_and_a_hundred_thousand_adapters() -> None:
    found = simulate(adapters(3000, of=100_000, per_s=1000.0), service(), num_replicas=1000, policy="warm")
    assert (found.num_served, found.num_refused) == (3000, 0)
