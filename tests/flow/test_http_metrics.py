"""GET /metrics: what is counted, under which names, and that clients cannot make it grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.core.cards import Residency
from serve_app.core.delta import Load
from serve_app.core.ledger import FlowUsage, UsageReport
from serve_app.http import metrics as metrics_module
from serve_app.http.app import build_app
from serve_app.http.metrics import Metrics
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card

NUM_ADAPTERS = metrics_module.MAX_MODELS + 10


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet("router-0")
    adapters = [adapter_card(f"a{number}") for number in range(NUM_ADAPTERS)]
    backend = FakeBackend(replica_card("r0", model_card("tiny", *adapters)))
    fleet.put(backend.card, backend)
    yield fleet
    await fleet.close()


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(Router(fleet), metrics=Metrics(fleet, router_id="r")))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def samples(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """By name and the values of the labels, without the router's."""
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *(f"{label}={value}" for label, value in sorted(sample.labels.items()) if label != "router")):
        sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }  # fmt: skip


async def test_a_completion_is_counted_with_its_tokens_and_times(client):
    body = {"model": "tiny", "prompt": ["one two", "three"], "max_tokens": 4, "n": 2}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    found = await samples(client)
    assert found["serve_app_requests_total", "model=tiny", "route=/v1/completions", "status=200"] == 1
    assert found["serve_app_prompt_tokens_total", "model=tiny"] == 3
    assert found["serve_app_cached_tokens_total", "model=tiny"] == 1
    assert found["serve_app_completion_tokens_total", "model=tiny"] == 16
    assert found["serve_app_queue_seconds_count", "model=tiny"] == 2
    assert found["serve_app_request_seconds_count", "route=/v1/completions"] == 1
    for name in ("time_to_first_token", "inter_token", "decode"):
        assert found[f"serve_app_{name}_seconds_count", "model=tiny"] == 1


async def test_each_model_of_a_list_counts_its_own_and_all_mixes_of_a_base_are_one_series(client):
    models = ["tiny", "tiny:a1", "tiny:a1*0.5", "tiny:a1*0.25+a2"]
    body = {"model": models, "prompt": ["one two", "three"], "max_tokens": 4, "n": 2}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    await client.post("/v1/completions", json={"model": "tiny:a3*2", "prompt": "a", "max_tokens": 1})
    found = await samples(client)
    assert found["serve_app_requests_total", "model=several", "route=/v1/completions", "status=200"] == 1
    assert found["serve_app_requests_total", "model=tiny:*", "route=/v1/completions", "status=200"] == 1
    tokens = {key[1]: value for key, value in found.items() if key[0] == "serve_app_completion_tokens_total"}
    assert tokens == {"model=tiny": 16, "model=tiny:a1": 16, "model=tiny:*": 33}
    assert found["serve_app_prompt_tokens_total", "model=tiny:a1"] == 3
    assert found["serve_app_queue_seconds_count", "model=tiny:a1"] == 2
    assert found["serve_app_decode_seconds_count", "model=tiny:a1"] == 1


async def test_the_loads_of_the_replicas_are_those_last_heard_of_and_end_with_them(client, fleet):
    load = Load(num_running=1, num_waiting=2, num_free_blocks=3, num_blocks=4)
    card = fleet.replicas[0][0]
    totals = {"num_steps": 5, "num_preemptions": 6, "num_prefix_hit_tokens": 7}
    totals |= {"num_drafted_tokens": 9, "num_accepted_tokens": 8}
    fleet.put(replace(card, load=replace(load, **totals)), FakeBackend())
    found = await samples(client)
    names = ["sequences_running", "sequences_waiting", "blocks_free", "blocks"]
    names += ["steps_total", "preemptions_total", "prefix_hit_tokens_total", "drafted_tokens_total"]
    names += ["accepted_tokens_total"]
    told = [found[f"serve_app_replica_{name}", "model=tiny", "replica=r0"] for name in names]
    assert told == [1, 2, 3, 4, 5, 6, 7, 9, 8]
    fleet.remove("r0")
    assert not [key for key in await samples(client) if "replica=r0" in key]


async def test_the_adapters_of_the_replicas_are_told_with_what_they_take(client, fleet):
    found = Residency(versions=("a", "b"), num_slots=4, load_s=0.25, num_loads=5, num_hits=6, num_bytes=7, max_bytes=8)
    fleet.put(replace(fleet.replicas[0][0], residency=found), FakeBackend())
    told = await samples(client)
    names = ["adapters_resident", "adapter_slots", "adapter_bytes", "adapter_budget_bytes", "adapter_load_seconds"]
    names += ["adapter_loads_total", "adapter_hits_total"]
    assert [told[f"serve_app_replica_{name}", "model=tiny", "replica=r0"] for name in names] == [2, 4, 7, 8, 0.25, 5, 6]


async def test_what_a_replica_does_not_know_has_no_series(client, fleet):
    card = fleet.replicas[0][0]
    load = Load(num_blocks=4, block_bytes=10, num_cached_blocks=None)
    fleet.put(replace(card, residency=Residency(num_slots=4), load=load), FakeBackend())
    told = {(name.removeprefix("serve_app_replica_"), *labels) for name, *labels in await samples(client)}
    of_it = {name for name, *_ in told if name.startswith("adapter")}
    assert of_it == {
        "adapters_resident",
        "adapter_slots",
        "adapter_loads_total",
        "adapter_hits_total",
        "adapters_revision",
    }
    assert {label for name, *labels in told if name == "kv_bytes" for label in labels if "state" in label} == {
        "state=budget", "state=used",
    }  # fmt: skip


async def test_what_was_computed_for_each_flow_is_told_and_ends_with_the_replica(client, fleet):
    card = fleet.replicas[0][0]
    flows = (FlowUsage(flow="acme", engine_ns=2_000_000_000, num_rows=7, num_generated=3, service=11.0),)
    usage = UsageReport(elapsed_ns=5_000_000_000, idle_ns=3_000_000_000, flows=flows, gap=4.0)
    fleet.put(replace(card, usage=usage), FakeBackend())
    found = await samples(client)
    names = ("flow_seconds_total", "flow_rows_total", "flow_generated_tokens_total", "flow_service_total")
    labels = ("flow=acme", "model=tiny", "replica=r0")
    assert [found[f"serve_app_replica_{name}", *labels] for name in names] == [2.0, 7.0, 3.0, 11.0]
    assert found["serve_app_replica_idle_seconds_total", "model=tiny", "replica=r0"] == 3.0
    assert found["serve_app_replica_flow_gap", "model=tiny", "replica=r0"] == 4.0
    fleet.remove("r0")
    assert not [key for key in await samples(client) if "flow=acme" in key]


async def test_gateways_read_one_series_per_model_of_all_of_its_replicas_in_the_names_of_vllm():
    fleet = Fleet("router-0")
    card = replace(model_card("tiny", adapter_card("sql"), adapter_card("new", "v2")), block_size=16)
    card = replace(card, max_num_sequences=4, max_waiting=4)
    backend = FakeBackend(replica_card("r0", card), is_stepped=True)
    load = Load(num_running=3, num_waiting=2, num_blocks=100, num_free_blocks=40)
    for replica, versions in (("r0", ("v1",)), ("r1", ())):
        residency = Residency(versions=versions, num_slots=4)
        fleet.put(replace(replica_card(replica, card), load=load, residency=residency), backend)
    fleet.expect(["tiny", "idle"])
    fleet.rest("idle", model_card("idle"))
    transport = httpx.ASGITransport(build_app(Router(fleet)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        found = {key: value for key, value in (await samples(client)).items() if key[0].startswith("vllm:")}
    await fleet.close()
    asked_at = found.pop(
        ("vllm:lora_requests_info", "max_lora=8", "model_name=tiny", "running_lora_adapters=tiny:sql",
         "waiting_lora_adapters=")
    )  # fmt: skip
    assert asked_at > 1.7e9, "the time, as the picker takes the newest"
    no_adapters = ("max_lora=0", "model_name=idle", "running_lora_adapters=", "waiting_lora_adapters=")
    assert found.pop(("vllm:lora_requests_info", *no_adapters)) > 1.7e9
    assert found == {
        ("vllm:num_requests_running", "model_name=tiny"): 6,
        ("vllm:num_requests_waiting", "model_name=tiny"): 4,
        ("vllm:kv_cache_usage_perc", "model_name=tiny"): 0.6,
        ("vllm:cache_config_info", "block_size=16", "model_name=tiny", "num_gpu_blocks=200"): 1,
        ("vllm:num_requests_running", "model_name=idle"): 0,
        ("vllm:num_requests_waiting", "model_name=idle"): 0,
        ("vllm:kv_cache_usage_perc", "model_name=idle"): 0,
        ("vllm:cache_config_info", "block_size=0", "model_name=idle", "num_gpu_blocks=0"): 1,
    }


async def test_what_waits_in_the_router_itself_waits_for_gateways_too():
    fleet = Fleet("router-0")
    backend = FakeBackend(replica_card("r0", replace(model_card(), max_num_sequences=4, max_waiting=4)))
    backend.submit_gate.clear()
    fleet.put(backend.card, backend)
    router = Router(fleet)
    transport = httpx.ASGITransport(build_app(router))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client, asyncio.timeout(60):
        asking = asyncio.create_task(client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "n": 3}))
        while not router.admission.sequences["tiny"][0]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert (await samples(client))["vllm:num_requests_waiting", "model_name=tiny"] == 3
        backend.submit_gate.set()
        assert (await asking).status_code == 200
        assert (await samples(client))["vllm:num_requests_waiting", "model_name=tiny"] == 0
    await fleet.close()


async def test_names_that_clients_invent_make_no_series(client):
    for number in range(20):
        await client.post("/v1/completions", json={"model": f"no{number}", "prompt": "a"})
        await client.get(f"/v1/models/no{number}")
        await client.get(f"/no/such/{number}")
        await client.post("/v1/completions", content=b"not json")
    requests = [key for key in await samples(client) if key[0] == "serve_app_requests_total"]
    assert sorted(key[2:] for key in requests) == [
        ("route=/v1/completions", "status=400"),
        ("route=/v1/completions", "status=404"),
        ("route=/v1/models/{id}", "status=404"),
        ("route=other", "status=404"),
    ]


@pytest.mark.slow
async def test_more_adapters_than_the_cap_share_one_series(client):
    for number in range(NUM_ADAPTERS):
        await client.post("/v1/completions", json={"model": f"tiny:a{number}", "prompt": "a", "max_tokens": 1})
    found = await samples(client)
    tokens = {key[1]: value for key, value in found.items() if key[0] == "serve_app_completion_tokens_total"}
    assert len(tokens) == metrics_module.MAX_MODELS + 1
    assert tokens["model=other"] == 10
