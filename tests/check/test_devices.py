"""A divided model gets the GPUs that it wants, or the check says on which line it does not."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.check.devices import check_devices
from serve_app.deployments.apps import model
from serve_app.deployments.arguments import ModelArgs

ARGS = {"name": "a", "path": "a", "tensor_parallel": 2}


def findings(options: dict[str, Any] | None, **changes: Any) -> list[str]:
    deployment = {"name": "Model"} if options is None else {"name": "Model", "ray_actor_options": options}
    application = {"name": "a", "deployments": [deployment]}
    return [
        finding.message for finding in check_devices(application, ModelArgs(**{**ARGS, **changes}), ("applications", 0))
    ]


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"num_cpus": 4}, {"device": "cuda"}),
        ({"num_gpus": 1}, {"device": "cuda"}),
        ({"num_gpus": 1}, {"device": "auto"}),
    ],
)
def test_a_divided_model_without_its_gpus_is_found(options: dict[str, Any], changes: dict[str, Any]) -> None:
    [message] = findings(options, **changes)
    assert "num_gpus: 2" in message


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"num_gpus": 2}, {"device": "cuda"}),
        ({"num_cpus": 2}, {"device": "cpu"}),
        ({"num_cpus": 2}, {"device": "auto"}),
        ({"num_cpus": 2}, {"device": "cuda", "tensor_parallel": 1}),
        (None, {"device": "cuda"}),
    ],
)
def test_what_fits_or_is_left_to_the_builder_is_no_finding(
    options: dict[str, Any] | None, changes: dict[str, Any]
) -> None:
    assert findings(options, **changes) == []


@pytest.mark.parametrize(("count", "device", "asked"), [(2, "cuda", 2), (2, "cpu", 0), (1, "cuda", 0)])
def test_the_builder_asks_for_as_many_gpus_as_there_are_shards(count: int, device: str, asked: int) -> None:
    application = model(ModelArgs(**{**ARGS, "tensor_parallel": count, "device": device}))
    options = application._bound_deployment.ray_actor_options or {}
    assert options.get("num_gpus", 0) == asked
