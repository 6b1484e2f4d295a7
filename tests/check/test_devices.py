"""A divided model gets the GPUs that it wants, or the check says on which line it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.check.cluster_file import read_blueprint
from serve_app.check.document import Severity
from serve_app.check.memory import Ask, asks_of, check_devices, check_schedule
from serve_app.deployments.apps import model
from serve_app.deployments.arguments import ModelArgs

REPOSITORY = Path(__file__).parents[2]
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
        ({"num_cpus": 2}, {"device": "auto", "tensor_parallel": 1}),
        ({"num_gpus": 0.5}, {"device": "cuda", "tensor_parallel": 1}),
        ({"num_gpus": 0}, {"device": "cuda", "tensor_parallel": 1}),
        (None, {"device": "cuda"}),
    ],
)
def test_what_fits_or_is_left_to_the_builder_is_no_finding(
    options: dict[str, Any] | None, changes: dict[str, Any]
) -> None:
    assert findings(options, **changes) == []


@pytest.mark.parametrize(
    ("count", "device", "asked"), [(2, "cuda", 2), (2, "cpu", 0), (1, "cuda", 1), (1, "cpu", 0), (1, "auto", 0)]
)
def test_the_builder_asks_for_as_many_gpus_as_there_are_shards(count: int, device: str, asked: int) -> None:
    application = model(ModelArgs(**{**ARGS, "tensor_parallel": count, "device": device}))
    (inner,) = application._bound_deployment.init_args  # the application's entrance has the model behind it
    options = inner._bound_deployment.ray_actor_options or {}
    assert options.get("num_gpus", 0) == asked


def test_replicas_that_would_share_the_first_gpu_are_warned_of() -> None:
    [message] = findings({"num_cpus": 2}, device="cuda", tensor_parallel=1)
    assert "Add `num_gpus: 1`" in message


def ask(name: str, num_replicas: int, **options: float) -> Ask:
    return Ask(path=(name,), name=name, num_replicas=num_replicas, options=options)


@pytest.mark.parametrize(
    ("asks", "told"),
    [
        ([ask("a", 1, num_cpus=64)], ("a", "each replica of a asks for 64 CPUs, and this machine has 2:")),
        ([ask("a", 2), ask("b", 1, num_cpus=0.1)], ("b", "1 replicas of b at 0.1 all up to here ask for 2.1 CPUs")),
        ([ask("r", 1, num_cpus=0.2), *(ask(name, 2, num_cpus=0.5) for name in "ab")], ("b", "ask for 2.2 CPUs")),
        ([ask("a", 1, num_cpus=0, num_gpus=1)], ("a", "each replica of a asks for 1 GPUs, and this machine has 0:")),
    ],
)
def test_replicas_that_ray_cannot_place_on_this_machine_are_told(asks: list[Ask], told: tuple[str, str]) -> None:
    [finding] = check_schedule(asks, {"num_cpus": 2, "num_gpus": 0})
    assert (finding.path, finding.severity) == ((told[0], "ray_actor_options"), Severity.WARNING)
    assert told[1] in finding.message
    assert "or `num_replicas`" in finding.message


@pytest.mark.parametrize("asks", [[], [ask("a", 2)], [ask("r", 1, num_cpus=0.2), *[ask("m", 2, num_cpus=0.3)] * 3]])
def test_of_replicas_that_ray_can_place_nothing_is_said(asks: list[Ask]) -> None:
    assert list(check_schedule(asks, {"num_cpus": 2, "num_gpus": 0})) == []


def test_a_copy_of_the_repositorys_last_application_is_placed_on_two_cores() -> None:
    applications = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text(encoding="utf-8"))["applications"]
    asks: list[Ask] = []
    for application in (*applications, {**applications[-1], "name": "another"}):
        built = read_blueprint(application["import_path"], application["args"], application=application["name"])
        asks += asks_of(application, built.deployments or {}, (application["name"],))
    assert [each.num_replicas for each in asks] == [1, 2, 2]
    assert list(check_schedule(asks, {"num_cpus": 2, "num_gpus": 0})) == []
    more = asks_of({**application, "deployments": [{"name": "Model", "num_replicas": 8}]}, built.deployments or {}, ())
    [finding] = check_schedule([*asks, *more], {"num_cpus": 8, "num_gpus": 0})
    assert "ask for 9.8 CPUs" in finding.message
