"""The service as clients see it, with the openai client, on the real cluster file."""

from __future__ import annotations

import asyncio
import signal

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from serve_app.core.cards import ReplicaCard
from serve_app.deployments.ray_private import http_host
from tests.cluster.faults import TIMEOUT_S, cards, signal_a_replica, until

pytestmark = pytest.mark.cluster


@pytest.fixture
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)


def work() -> list[int]:
    """Sequences running or waiting, per replica."""
    return [card.load.num_running + card.load.num_waiting for card in cards()]


def steps() -> dict[str, int]:
    """Engine steps so far, per replica."""
    return {card.replica_id: card.load.num_steps for card in cards()}


def test_a_router_learns_where_serve_listens(base_url: str) -> None:
    assert http_host() == httpx.URL(base_url).host == "127.0.0.1"


def test_a_prompt_is_completed(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=12, temperature=0)
    assert completion.choices[0].finish_reason in {"length", "stop"}
    assert completion.choices[0].text
    assert completion.usage is not None
    assert completion.usage.completion_tokens <= 12


def test_streamed_text_is_the_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=24, temperature=0)
    stream = client.completions.create(
        model="demo", prompt="Once upon a time", max_tokens=24, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert len(pieces) > 1
    assert "".join(pieces) == whole.choices[0].text


def test_an_adapter_is_a_model_and_answers_otherwise_than_its_base(client: openai.OpenAI) -> None:
    names = {model.id for model in client.models.list()}
    assert "demo" in names
    adapter = min(name for name in names if name.startswith("demo:"))
    texts = {
        client.completions.create(model=name, prompt="Once upon a time", max_tokens=16, temperature=0).choices[0].text
        for name in ("demo", adapter)
    }
    assert len(texts) == 2


def test_a_list_of_models_is_answered_by_each_as_it_answers_alone(client: openai.OpenAI) -> None:
    models = ["demo", "demo:pirate", "demo:pirate*0.6+shout*0.4", "demo:shout*0.5"]
    asked = {"prompt": ["Once upon a time", "The owl"], "max_tokens": 8, "seed": 5}
    together = client.completions.create(model="", extra_body={**asked, "model": models}, prompt="")
    assert together.model == ",".join(models)
    for at, model in enumerate(models):
        alone = client.completions.create(model=model, extra_body=asked, prompt="")
        own = together.choices[2 * at : 2 * at + 2]
        assert [choice.index for choice in own] == [2 * at, 2 * at + 1]
        assert [choice.model_extra["model"] for choice in own if choice.model_extra is not None] == [model] * 2
        assert [choice.text for choice in own] == [choice.text for choice in alone.choices]


def test_a_batch_of_prompts_runs_on_both_replicas_and_comes_back_in_order(client: openai.OpenAI) -> None:
    prompts = [f"Story {number}: the" for number in range(16)]
    alone = [
        client.completions.create(model="demo", prompt=prompt, max_tokens=8, temperature=0).choices[0].text
        for prompt in prompts[:2]
    ]
    before = steps()
    assert len(before) == 2

    def steps_after_a_batch() -> dict[str, int]:
        """A router looks for replicas once a second: it may not know the second one yet."""
        batch = client.completions.create(model="demo", prompt=prompts, max_tokens=8, temperature=0)
        assert [choice.index for choice in batch.choices] == list(range(16))
        assert [choice.text for choice in batch.choices[:2]] == alone
        return steps()

    until(steps_after_a_batch, holds=lambda after: all(after[replica] > before[replica] for replica in before))


def test_the_neighbours_reach_a_replica(base_url: str) -> None:
    with httpx.Client(base_url=base_url, timeout=TIMEOUT_S) as http:
        tokens = http.post("/tokenize", json={"content": "Once upon a time"}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": tokens}).json()["content"] == "Once upon a time"
        native = http.post("/completion", json={"prompt": "Once upon a time", "n_predict": 4, "temperature": 0}).json()
        assert native["tokens_predicted"] == 4
        assert {entry["id"] for entry in http.get("/lora-adapters").json()} == {0, 1, 2}
        assert "serve_app_replica_step_seconds_total" in http.get("/metrics").text
        assert "/v1/completions" in http.get("/openapi.json").json()["paths"]


def test_a_chat_is_rendered_by_a_replica_and_answered(client: openai.OpenAI) -> None:
    message: ChatCompletionUserMessageParam = {"role": "user", "content": "What is the capital of France?"}
    chat = client.chat.completions.create(model="demo", messages=[message], temperature=0)
    assert chat.choices[0].message.content == "The capital of France is Paris."
    stream = client.chat.completions.create(model="demo", messages=[message], temperature=0, stream=True)
    texts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(texts) == chat.choices[0].message.content


def test_a_dialect_decides_what_an_error_looks_like(base_url: str) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": -1}
    for dialect, status in (("mistral.rs", 422), ("openai", 400), ("union", 200)):
        response = httpx.post(
            f"{base_url}/v1/completions", json=body, headers={"X-Completions-Dialect": dialect}, timeout=TIMEOUT_S
        )
        assert (response.status_code, response.headers["x-completions-dialect"]) == (status, dialect)


def test_the_service_is_healthy(base_url: str) -> None:
    assert httpx.get(f"{base_url}/health", timeout=TIMEOUT_S).status_code == 200


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"model": "nobody", "prompt": "x"}, openai.NotFoundError),
        ({"model": "demo:nobody", "prompt": "x"}, openai.NotFoundError),
        ({"model": "demo", "prompt": "x", "temperature": -1}, openai.BadRequestError),
        ({"model": "demo", "prompt": "word " * 5000}, openai.BadRequestError),
    ],
)
def test_errors_of_router_and_replica_reach_the_client_as_themselves(
    client: openai.OpenAI, body: dict[str, object], error: type[openai.APIStatusError]
) -> None:
    with pytest.raises(error) as caught:
        client.completions.create(**body)  # type: ignore[call-overload]
    assert caught.value.body


def test_a_prompt_of_many_megabytes_is_refused_for_its_length_and_no_replica_is_lost(base_url: str) -> None:
    body = {"model": "demo", "prompt": "é" * 3_900_000, "max_tokens": 1}
    response = httpx.post(f"{base_url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert (response.status_code, response.json()["error"]["error_code"]) == (400, "context_length_exceeded")


def test_a_client_that_leaves_frees_the_engine(base_url: str) -> None:
    until(work, holds=lambda load: sum(load) == 0)
    prompts = [f"Once upon a time there were {number} animals" for number in range(32)]
    endless = {"n": 32, "max_tokens": -1, "temperature": 2.0}  # so hot that texts hardly end by themselves
    body = {"model": "demo", "prompt": prompts, "stream": True, **endless}
    with httpx.stream("POST", f"{base_url}/v1/completions", json=body, timeout=TIMEOUT_S) as response:
        assert response.status_code == 200
        next(response.iter_lines())
        until(work, holds=lambda load: sum(load) > 500)
    until(work, holds=lambda load: sum(load) == 0)  # computing it all would take minutes


async def test_a_killed_replica_is_not_noticed_by_clients_and_is_replaced(base_url: str) -> None:
    before = {card.replica_id for card in await asyncio.to_thread(cards)}
    await asyncio.to_thread(signal_a_replica, signal.SIGKILL)
    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S) as client:
        for _ in range(20):
            body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 4}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
    now = await asyncio.to_thread(until, cards, holds=lambda found: len(found) == 2 and _are_new(found, before))
    assert len({card.replica_id for card in now} - before) == 1


def _are_new(found: list[ReplicaCard], before: set[str]) -> bool:
    return {card.replica_id for card in found} != before
