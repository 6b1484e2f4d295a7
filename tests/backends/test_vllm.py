"""vLLM computes the texts that our engine computes: every sampler, constraint and adapter, alone and together.

`make test-vllm` runs these where vLLM is installed in a Python of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
import torch

pytest.importorskip("vllm")

from serve_app.backends.vllm.options import engine_arguments, vllm_config, wrong_options
from serve_app.catalog.models import BUILTIN_MODELS
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.text_part import ModelNotSupported
from serve_app.kernels.forms import PlainKernels, largest_error
from tests.api.test_dialects import COMPANIONS, VALUES
from tests.flow.stack import Stack, running_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
BODIES: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "several": {"temperature": 0.9, "seed": 7, "n": 3, "top_p": 0.9, "top_k": 20},
    "list": {"prompt": ["One day", "The dog was"], "temperature": 0.7, "min_p": 0.05, "seed": 3, "logprobs": 2},
    "echo": {"temperature": 0, "echo": True, "logprobs": 1},
    "scored": {"max_tokens": 0, "echo": True, "logprobs": 2},
    "mirostat": {"mirostat_mode": 2, "seed": 1},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "seed": 2},
    "DRY and XTC": {"dry_multiplier": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.05, "seed": 2},
    "bias and stop": {"temperature": 0, "logit_bias": {"5": 3.0}, "stop": ["e"]},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, "seed": 4},
    "regex": {"regex": "[a-c]{5,9}", "seed": 4},
    "at least": {"min_tokens": 12, "max_tokens": 12, "seed": 9},
    "adapter": {"model": "demo:pirate", "temperature": 0},
    "another adapter": {"model": "demo:shout", "temperature": 0},
    "long": {"prompt": "once " * 150, "temperature": 0},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    """With two adapters in two slots, and compiled, as where nothing is said."""
    async with running_stack(num_replicas=1, engine="vllm", max_adapters=2) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def right() -> dict[str, Any]:
    """The answers of our own engine."""
    async with running_stack(num_replicas=1, engine="own") as made:
        return {name: await answer(made, body) for name, body in BODIES.items()}


async def answer(stack: Stack, body: Mapping[str, Any]) -> Any:
    response = await stack.post({"model": "demo", "prompt": "Once upon a time", "max_tokens": 24, **body})
    assert response.status_code == 200, response.text
    return rounded({name: response.json()[name] for name in ("choices", "usage")})


def rounded(value: Any) -> Any:
    """Log-probabilities are equal but for their last digits; what was cached depends on who asked before."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items() if name != "prompt_tokens_details"}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 2) if isinstance(value, float) else value


LACKED = {"lora": "scaled adapters", "return_hidden_states": "hidden_states", "return_routed_experts": "routed_experts"}
"""Parameters of the contract that this engine refuses, and what the refusal calls what it lacks."""
PARAMETERS: Mapping[str, dict[str, Any]] = {
    name: {"seed": 5, **COMPANIONS.get(name, {}), name: value}
    for name, value in {**VALUES, "t_max_predict_ms": 600_000, "request_id": "another"}.items()
}


async def outcome(stack: Stack, body: Mapping[str, Any]) -> tuple[int, Any]:
    """The status of a request, and its choices, the joined text of its stream, or its error."""
    response = await stack.post({"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, **body})
    if body.get("stream") and response.status_code == 200:
        lines = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        return 200, "".join(choice["text"] for event in events for choice in event["choices"])
    found = response.json()
    return response.status_code, rounded(found["choices"]) if response.status_code == 200 else found["error"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def outcomes() -> dict[str, tuple[int, Any]]:
    """What our own engine makes of each parameter."""
    async with running_stack(num_replicas=1, engine="own") as made:
        return {name: await outcome(made, body) for name, body in PARAMETERS.items()}


@pytest.mark.parametrize("name", sorted(PARAMETERS.keys() - LACKED))
async def test_a_parameter_does_what_it_does_with_our_engine(
    stack: Stack, outcomes: dict[str, tuple[int, Any]], name: str
) -> None:
    assert await outcome(stack, PARAMETERS[name]) == outcomes[name]


@pytest.mark.parametrize("name", LACKED)
async def test_a_parameter_that_it_lacks_is_refused_by_name_with_the_engine_that_has_it(
    stack: Stack, name: str
) -> None:
    status, error = await outcome(stack, PARAMETERS[name])
    assert (status, error["param"]) == (400, name)
    assert f"engine (vllm) does not support {LACKED[name]}" in error["message"]
    assert "engine: own" in error["message"]


async def test_what_it_lacks_is_told_where_models_and_dialects_are_listed(stack: Stack) -> None:
    lacks = ["embeddings", "hidden_states", "mixed adapters", "routed_experts", "scaled adapters"]
    listed = {each["id"]: (each["engine"], each["lacks"]) for each in (await stack.get("/v1/models")).json()["data"]}
    assert listed["demo"] == listed["demo:pirate"] == ("vllm", lacks)
    engines = (await stack.get("/v1/dialects")).json()["engines"]
    assert engines == {"demo": {"engine": "vllm", "lacks": lacks}}
    response = await stack.post({"model": "demo", "input": "Once"}, "/v1/embeddings")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize("name", BODIES)
async def test_an_answer_is_that_of_our_engine(stack: Stack, right: dict[str, Any], name: str) -> None:
    assert await answer(stack, BODIES[name]) == right[name]


async def test_in_company_each_answer_is_the_same_and_nothing_is_left_behind(
    stack: Stack, right: dict[str, Any]
) -> None:
    names = [*BODIES] * 3
    found = await asyncio.gather(*(answer(stack, BODIES[name]) for name in names))
    assert {name for name, each in zip(names, found, strict=True) if each != right[name]} == set()
    core: Any = stack.services[0].engine.core  # type: ignore[attr-defined]
    async with asyncio.timeout(60):
        while core.has_work:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    core.check_integrity()
    assert core.load.num_free_blocks == core.load.num_blocks


async def test_a_request_that_vllm_does_not_take_ends_and_the_next_one_is_computed(
    stack: Stack, right: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: object) -> None:
        raise RuntimeError("not this one")

    with monkeypatch.context() as changes:
        changes.setattr(stack.services[0].engine.core.core, "preprocess_add_request", failing)
        response = await asyncio.wait_for(stack.post({"model": "demo", "prompt": "Once", "max_tokens": 4}), 60)
    assert "failed while it computed" in response.json()["error"]["message"], (
        "and is not forgotten until others are done"
    )
    assert await answer(stack, BODIES["greedy"]) == right["greedy"]


async def test_beside_full_slots_a_row_without_an_adapter_is_the_bases(stack: Stack, right: dict[str, Any]) -> None:
    for name in ("adapter", "another adapter"):
        assert await answer(stack, BODIES[name]) == right[name]
    assert stack.services[0].engine.residency.num_slots == len(stack.services[0].engine.residency.versions) == 2
    for name in ("greedy", "echo", "long"):
        assert await answer(stack, BODIES[name]) == right[name]


async def test_what_torch_computes_without_kernels_is_right() -> None:
    assert largest_error(PlainKernels(), torch.float32, torch.device("cpu")) <= 1e-5


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("scaled adapters", {"lora": [{"id": 0, "scale": 0.5}]}),
        ("scaled adapters", {"model": "demo:pirate*0.5"}),
        ("mixed adapters", {"model": "demo:pirate*0.5+shout*0.5"}),
    ],
)
async def test_what_it_cannot_do_is_refused_by_name(stack: Stack, kind: str, body: dict[str, Any]) -> None:
    response = await stack.post({"model": "demo", "prompt": "Once", "max_tokens": 4, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, next(iter(body)))
    assert f"whose engine (vllm) does not support {kind}" in error["message"]


def test_its_options_are_checked_by_name() -> None:
    assert [*wrong_options({"enforce_eager": True})] == []
    assert "model" in next(wrong_options({"model": "other"}))
    assert "eager" in next(wrong_options({"eager": True}))
    with pytest.raises(ModelNotSupported, match="tensor_parallel"):
        engine_arguments(EngineConfig(name="demo", path="", tensor_parallel=2), ())


@pytest.mark.parametrize("slots", [0, 2])
def test_a_step_is_compiled_with_adapters_and_without_but_not_without_a_compiler(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(BUILTIN_MODELS["builtin:demo"])
    arguments = engine_arguments(EngineConfig(name="demo", path=folder, max_adapters=slots), ())
    assert vllm_config(arguments, []).compilation_config.mode
    assert not vllm_config(arguments | {"enforce_eager": True}, []).compilation_config.mode
    monkeypatch.setenv("CXX", "no-such-compiler")
    plain = vllm_config(arguments, [])
    assert not plain.compilation_config.mode
    assert "all" in plain.compilation_config.custom_ops, "what vLLM has in C++ is computed so"
    assert bool(plain.lora_config) == bool(slots)


def test_options_of_adapters_that_our_kernels_do_not_know_are_refused_where_there_may_be_adapters() -> None:
    told = EngineConfig(name="demo", path=str(BUILTIN_MODELS["builtin:demo"]), vllm={"fully_sharded_loras": True})
    with pytest.raises(ModelNotSupported, match="fully_sharded_loras must be left out on CPUs"):
        vllm_config(engine_arguments(told, ()), [])
    assert vllm_config(engine_arguments(replace(told, max_adapters=0), ()), [])


async def test_a_step_with_adapters_of_other_layers_is_not_compiled(right: dict[str, Any]) -> None:
    layers = {"lora_target_modules": ["q_proj", "v_proj", "embed_tokens"]}
    async with running_stack(num_replicas=1, adapters=None, engine="vllm", max_adapters=1, vllm=layers) as stack:
        (model,) = stack.services[0].engine.core.core.collective_rpc("get_model")
        assert {each.do_not_compile for each in model.modules() if hasattr(each, "do_not_compile")} == {True}
        assert await answer(stack, BODIES["greedy"]) == right["greedy"]
