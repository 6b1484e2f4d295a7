"""What a cluster file may say is exactly what the rooms behind it understand."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace

import pytest
from pydantic import BaseModel, ValidationError

from serve_app.api.limits import WireLimits
from serve_app.deployments.arguments import CanarySettings, LimitSettings, ModelArgs, RouterSettings
from serve_app.deployments.router import run_settings
from serve_app.engine.config import EngineConfig
from serve_app.router.rollout import RolloutSettings

OF_THE_CARD = (
    *("adapters", "dialect", "chat_template", "tool_parser", "tools_without_template"),
    *("default_sampling", "reasoning_parser", "pooling"),
)
"""Settings that the engine does not need."""


def test_a_model_has_a_card_where_its_adapters_cannot_be_looked_for() -> None:
    assert ModelArgs(name="demo", path="builtin:demo", adapters="/" + 300 * "x").card.adapters == ()


@pytest.mark.parametrize(
    ("args", "refused"),
    [
        ({}, ("return_hidden_states", "return_routed_experts")),
        ({"return_hidden_states": True, "return_routed_experts": True}, ()),
        ({"return_hidden_states": True, "engine": "vllm"}, ("return_hidden_states", "return_routed_experts")),
    ],
)
def test_the_card_of_a_model_that_is_not_loaded_refuses_the_recordings_that_the_model_will(
    args: dict[str, object], refused: tuple[str, ...]
) -> None:
    found = ModelArgs.model_validate({"name": "demo", "path": "builtin:demo"} | args)
    assert found.card.records.refuses == refused


@pytest.mark.parametrize(
    ("settings", "target"), [(ModelArgs, EngineConfig), (LimitSettings, WireLimits), (CanarySettings, RolloutSettings)]
)
def test_every_field_can_be_set_and_has_the_same_default(settings: type[BaseModel], target: type) -> None:
    written = {name: field.default for name, field in settings.model_fields.items() if not field.is_required()}
    understood = {field.name: field.default for field in fields(target) if field.default is not MISSING}
    assert {name: value for name, value in written.items() if name not in OF_THE_CARD} == understood


@pytest.mark.parametrize("name", ["demo:a", "", "a b", "-a", "a/b", "x" * 97])
def test_a_base_name_that_could_not_be_addressed_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        ModelArgs(name=name, path="builtin:demo")


def test_a_placement_that_there_is_not_is_refused_in_the_cluster_file() -> None:
    assert RouterSettings().placement == "warm"
    with pytest.raises(ValidationError, match="'warm', 'least_work', 'power_of_two' or 'random'"):
        RouterSettings.model_validate({"placement": "round_robin"})


@pytest.mark.parametrize("name", ["ollama", "", "Union"])
def test_a_dialect_that_there_is_not_is_refused_in_the_cluster_file(name: str) -> None:
    with pytest.raises(ValidationError, match="must be one of union, openai"):
        ModelArgs(name="demo", path="builtin:demo", dialect=name)
    with pytest.raises(ValidationError, match="must be one of union, openai"):
        RouterSettings.model_validate({"dialect": name})


@pytest.mark.parametrize("weights", ["int5", "INT8", "fp8", "", 8, True])
def test_weights_in_bits_that_there_are_not_are_refused_by_what_there_are(weights: object) -> None:
    with pytest.raises(ValidationError, match="'int8' or 'int4'"):
        ModelArgs.model_validate({"name": "demo", "path": "builtin:demo", "weights": weights})


@pytest.mark.parametrize("rollout", [{"steps": [0.5, 1.0]}, {"steps": [5]}, {"requests": 0}, {"max_slowdown": -1}])
def test_a_rollout_with_impossible_bounds_is_refused(rollout: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RouterSettings.model_validate({"rollout": rollout})


def test_unknown_settings_are_refused_at_every_level() -> None:
    with pytest.raises(ValidationError):
        RouterSettings.model_validate({"limits": {"max_prompt": 1}})
    with pytest.raises(ValidationError):
        RouterSettings.model_validate({"alias": {}})


def test_a_clients_time_limit_leaves_what_the_operator_set_for_slow_readers() -> None:
    settings = RouterSettings.model_validate({"slow_reader": "abort", "max_pending_events": 7})
    limited = replace(run_settings(settings), timeout_s=1.5)
    assert (limited.timeout_s, limited.slow_reader, limited.max_pending_events) == (1.5, "abort", 7)


@pytest.mark.parametrize("origin", ["*", "https://app.example.org", "http://127.0.0.1:3000"])
def test_origins_are_what_browsers_send(origin: str) -> None:
    assert RouterSettings.model_validate({"cors_origins": [origin]}).cors_origins == (origin,)


@pytest.mark.parametrize("origin", ["app.example.org", "https://app.example.org/", "https://a b", "", "null"])
def test_what_no_browser_sends_as_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError):
        RouterSettings.model_validate({"cors_origins": [origin]})
    assert RouterSettings().cors_origins == ()
