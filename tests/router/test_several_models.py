"""Law: of a list of models each answers as it would alone; choices, usage and errors say whose they are."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from serve_app.api.completion import CompletionRequest
from serve_app.api.limits import DEFAULT_LIMITS, WireLimits
from serve_app.api.listings import parameters_of
from serve_app.api.parse import COMPLETION
from serve_app.api.responses import ResponseHead
from serve_app.core.errors import AdapterNotFound, ContextOverflow, InvalidRequest, ModelNotFound, Overloaded
from serve_app.core.request import GenerationRequest
from serve_app.router.admission import Admission
from serve_app.router.fleet import Fleet
from serve_app.router.inquiries import Explainer, Inquiries
from serve_app.router.native import collect_native
from serve_app.router.render import collect, completion_renderer
from serve_app.router.router import Router
from tests.fakes import FakeBackend, adapter_card, counting_script, model_card, replica_card
from tests.parsing import parse_completion

MODELS = ["tiny", "big", "tiny:sql", "big:sql*0.5+c"]


def signed(base: str) -> Any:
    def script(request: GenerationRequest, sample: int) -> list[str]:
        return [f" {base}{word}" for word in counting_script(request, sample)]

    return script


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet("router-0")
    for base, vocab_size in (("tiny", 1000), ("big", 2000)):
        card = model_card(base, adapter_card("sql"), adapter_card("c", "v2"), vocab_size=vocab_size)
        for number in range(2):
            backend = FakeBackend(replica_card(f"{base}-{number}", card), script=signed(base))
            fleet.put(backend.card, backend)
    yield fleet
    await fleet.close()


def make_request(limits: WireLimits = DEFAULT_LIMITS, **members: Any) -> CompletionRequest:
    sent = {"model": MODELS, "prompt": ["one two", "three"], "n": 2, "max_tokens": 3, "seed": 7, **members}
    return parse_completion(json.dumps(sent).encode(), limits)


async def whole(fleet: Fleet, **members: Any) -> dict[str, Any]:
    request = make_request(**members)
    async with Router(fleet).open(request) as run:
        head = ResponseHead(id="cmpl-1", created=7, model=request.model)
        body: dict[str, Any] = json.loads(json.dumps(await collect(run, request, head=head)))
        return body


@pytest.mark.law("Several models")
async def test_the_choices_of_a_model_in_a_list_are_those_of_the_model_alone(fleet: Fleet) -> None:
    body = await whole(fleet, echo=True, logprobs=1)
    assert body["model"] == "tiny,big,tiny:sql,big:sql*0.5+c"
    assert [choice["index"] for choice in body["choices"]] == list(range(16))
    prompt_tokens = completion_tokens = 0
    for at, model in enumerate(MODELS):
        alone = await whole(fleet, model=model, echo=True, logprobs=1)
        own = body["choices"][4 * at : 4 * at + 4]
        assert [choice.pop("model") for choice in own] == [model] * 4
        assert [choice.pop("index") for choice in own] == list(range(4 * at, 4 * at + 4))
        assert [{**choice, "index": index} for index, choice in enumerate(own)] == alone["choices"]
        prompt_tokens += alone["usage"]["prompt_tokens"]
        completion_tokens += alone["usage"]["completion_tokens"]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (prompt_tokens, completion_tokens)


async def test_each_chunk_of_a_stream_says_whose_it_is(fleet: Fleet) -> None:
    body = await whole(fleet)
    request = make_request(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    stream = b""
    async with Router(fleet).open(request) as run:
        renderer = completion_renderer(request, ResponseHead(id="cmpl-1", created=7, model=request.model), run.stats)
        async for event in run:
            stream += renderer.chunks(event)
        stream += renderer.tail()
    events = [line.removeprefix("data: ") for line in stream.decode().split("\n\n") if line]
    *chunks, last = [json.loads(event) for event in events[:-1]]
    texts: dict[tuple[int, str], str] = {}
    for chunk in chunks:
        assert chunk["model"] == body["model"]
        [choice] = chunk["choices"]
        key = (choice["index"], choice["model"])
        texts[key] = texts.get(key, "") + choice["text"]
        assert chunk["usage"]["prompt_tokens"] == (1 if choice["index"] // 2 % 2 else 2)
    assert texts == {(choice["index"], choice["model"]): choice["text"] for choice in body["choices"]}
    assert last["usage"] == body["usage"]


async def test_a_list_of_one_is_answered_as_a_list_and_a_name_as_ever(fleet: Fleet) -> None:
    listed, named = await whole(fleet, model=["tiny"]), await whole(fleet, model="tiny")
    assert (listed["model"], named["model"]) == ("tiny", "tiny")
    assert [choice.pop("model") for choice in listed["choices"]] == ["tiny"] * 4
    assert listed["choices"] == named["choices"]


async def test_the_best_are_chosen_for_each_model_and_prompt(fleet: Fleet) -> None:
    body = await whole(fleet, n=1, best_of=2)
    assert [(choice["index"], choice["model"]) for choice in body["choices"]] == [
        (2 * at + index, model) for at, model in enumerate(MODELS) for index in range(2)
    ]


async def test_the_native_shape_names_the_model_of_each_result(fleet: Fleet) -> None:
    request = make_request(n=1)
    async with Router(fleet).open(request) as run:
        results: Any = await collect_native(run, request)
    assert [result["model"] for result in results] == [model for model in MODELS for _ in range(2)]
    assert [result["prompt"] for result in results] == ["one two", "three"] * 4


async def test_draws_depend_on_the_prompts_index_and_not_on_the_models_place(fleet: Fleet) -> None:
    requests = Router(fleet).open(make_request(seed=None)).requests
    assert [each.prompt_index for each in requests] == [0, 1] * 4
    assert len({each.sampling.seed for each in requests}) == 1, "one seed, drawn once"
    assert len({each.request_id for each in requests}) == 8


async def test_every_base_gets_its_own_and_each_is_admitted(fleet: Fleet) -> None:
    admission = Admission(lambda: {})
    ticket = admission.enter()
    grown: list[Any] = []
    admission.grow = lambda ticket, sizes: grown.append(dict(sizes))  # type: ignore[method-assign]
    run = Router(fleet, admission=admission).open(make_request(), ticket)
    assert grown == [{"tiny": 8, "big": 8}]
    async with run:
        async for _ in run:
            pass
    assert run.num_finished == {"tiny": 8, "big": 8}


@pytest.mark.parametrize(
    ("members", "error", "param", "message"),
    [
        ({"model": ["tiny", "nobody"]}, ModelNotFound, "model[1]", '"model[1]" must be one that is served'),
        ({"model": ["tiny", "big:x"]}, AdapterNotFound, "model[1]", 'an adapter of "big"'),
        ({"model": ["tiny", "big"], "lora_path": "x"}, AdapterNotFound, "lora_path", 'an adapter of "tiny"'),
        ({"model": ["tiny:c", "big"], "adapter": "sql"}, InvalidRequest, "adapter", 'beside "model[0]"'),
        ({"model": ["big", "tiny"], "prompt": [1500]}, InvalidRequest, "prompt", 'Model "tiny": "prompt" must'),
        ({"model": ["big", "tiny"], "stop_token_ids": [1500]}, InvalidRequest, "stop_token_ids", 'Model "tiny": '),
        ({"model": ["big", "tiny"], "logit_bias": {"1500": 1}}, InvalidRequest, "logit_bias", 'Model "tiny": '),
    ],
)
async def test_what_is_wrong_with_one_of_them_names_it(
    members: dict[str, Any], error: type[Exception], param: str, message: str, fleet: Fleet
) -> None:
    with pytest.raises(error) as caught:
        Router(fleet).open(make_request(**members))
    assert (caught.value.param, message in str(caught.value)) == (param, True), str(caught.value)  # type: ignore[attr-defined]


async def test_what_a_replica_refuses_names_the_model(fleet: Fleet) -> None:
    for link in fleet._links.values():
        if link.card.model.name == "big":
            link._calls._backend.refusal = ContextOverflow("too long", "prompt", {"n_ctx": 512})  # type: ignore[attr-defined]
    run = Router(fleet).open(make_request(model=["tiny", "big:sql"]))
    with pytest.raises(ContextOverflow, match='Model "big:sql": too long') as caught:
        async with run:
            pass
    assert (caught.value.param, caught.value.facts) == ("prompt", {"n_ctx": 512})
    with pytest.raises(ContextOverflow, match=r"^too long$"):
        async with Router(fleet).open(make_request(model=["big"])):
            pass


async def test_an_overloaded_base_refuses_the_whole_request(fleet: Fleet) -> None:
    for link in fleet._links.values():
        if link.card.model.name == "big":
            link._calls._backend.refusal = Overloaded("full", None, {"retry_after_s": 3})  # type: ignore[attr-defined]
    with pytest.raises(Overloaded, match='Model "big":') as caught:
        async with Router(fleet).open(make_request(model=["tiny", "big"])):
            pass
    assert caught.value.retry_after_s == 3
    assert [link.num_outstanding for link in fleet.links_for(fleet.resolve("tiny"))] == [0, 0]


async def test_a_list_speaks_the_dialect_that_its_models_agree_on(fleet: Fleet) -> None:
    router = Router(fleet)
    for base, dialect in (("tiny", "sglang"), ("big", "llama.cpp")):
        for link in fleet.links_for(fleet.resolve(base)):
            card = link.card
            fleet.put(replica_card(card.replica_id, replace(card.model, dialect=dialect)), FakeBackend())
    assert router.dialect_of(["tiny", "tiny:sql"]).name == "sglang"
    assert router.dialect_of(["big"]).name == "llama.cpp"
    assert router.dialect_of(["tiny", "big"]).name == "union"
    assert router.dialect_of([]).name == "union"
    assert router.dialect_of([["tiny"], 5]).name == "union"


async def test_each_model_of_a_list_its_adapters_and_aliases_sample_as_their_own_folder_recommends() -> None:
    fleet = Fleet("router-0", aliases={"writer": "big:sql"})
    for base, said in (("tiny", (("temperature", 0.6),)), ("big", (("temperature", 0.3), ("top_k", 20)))):
        card = replace(model_card(base, adapter_card("sql")), default_sampling=said)
        backend = FakeBackend(replica_card(base, card))
        fleet.put(backend.card, backend)
    router = Router(fleet)
    request = make_request(model=["tiny", "big", "tiny:sql", "writer"], prompt="one", top_p=0.5)
    wanted = [(0.6, 0, 0.5), (0.3, 20, 0.5), (0.6, 0, 0.5), (0.3, 20, 0.5)]
    found = [each.sampling for each in router.open(request).requests]
    assert [(each.temperature, each.top_k, each.top_p) for each in found] == wanted
    listed = {entry.id: entry.default_sampling for entry in router.models()}
    assert listed["tiny:sql"] == listed["tiny"] == {"temperature": 0.6}
    assert listed["writer"] == listed["big"] == {"temperature": 0.3, "top_k": 20}

    parts = await Explainer(router, Inquiries(router.view)).explain(request)
    assert [each.default_sampling for each in parts][2:] == [listed["tiny"], listed["big"]]
    told = parameters_of(request, {"top_p": 0.5}, COMPLETION.table, [each.default_sampling for each in parts[1:2]])
    assert told["top_k"] == {"value": 20, "from": "model"}
    assert [told[name]["from"] for name in ("top_p", "min_p")] == ["body", "default"]  # type: ignore[index]
    await fleet.close()
