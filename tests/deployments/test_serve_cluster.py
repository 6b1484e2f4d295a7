"""What is known of a model that Serve has scaled to zero."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import ApplicationStatus

from serve_app.core.cards import ModelCard, Scale
from serve_app.deployments import serve_cluster
from serve_app.deployments.serve_cluster import MODEL_DEPLOYMENT, ServeCluster


class WithoutReplicas:
    """A handle as Serve gives it."""

    def broadcast(self, *call: object) -> WithoutReplicas:
        return self

    async def results_async(self, **how: object) -> list[object]:
        raise DeploymentUnavailableError(None)


def deploy(monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], *, states: Sequence[str] = ()) -> None:
    """Have Serve tell of the model `demo` with these arguments, and with replicas in these states."""
    status = SimpleNamespace(status=ApplicationStatus.RUNNING)
    overview = SimpleNamespace(name="demo", app_status=status, deployment_statuses=[SimpleNamespace(name="Model")])
    monkeypatch.setattr(serve_cluster, "application_overviews", lambda: [overview])
    monkeypatch.setattr(serve_cluster, "deployed", lambda deployment: {"demo": (len(states), states, args)})


async def asleep(monkeypatch: pytest.MonkeyPatch, args: dict[str, Any]) -> ModelCard | None:
    """As a router hears of the model `demo` with these arguments, of which Serve keeps no replica."""
    deploy(monkeypatch, args)
    monkeypatch.setattr(serve_cluster, "may_sleep", lambda application, deployment: deployment == MODEL_DEPLOYMENT)
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *name: WithoutReplicas())
    monkeypatch.setattr(serve_cluster, "by_value", lambda handle: handle)
    cluster = ServeCluster("router")
    await cluster.applications()
    return (await cluster.greet("demo", "router-0", {})).asleep


async def test_replicas_that_load_or_drain_take_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    states = ["RUNNING", "STARTING", "RUNNING", "STOPPING", "RECOVERING"]
    deploy(monkeypatch, {}, states=states)
    found = (await ServeCluster("router").applications())["demo"]
    assert (found.num_running, found.scale) == (2, Scale(wanted=5, starting=2, draining=1))


@pytest.mark.parametrize(
    ("args", "root"),
    [
        ({"name": "demo", "path": "builtin:demo"}, "builtin:demo"),
        ({}, "demo"),
        ({"weights": "of others"}, "demo"),
    ],
    ids=["ours", "no arguments", "another builder's"],
)
async def test_a_model_without_replicas_sleeps_whoever_has_built_it(
    args: dict[str, Any], root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await asleep(monkeypatch, args)
    assert found is not None
    assert (found.name, found.root) == ("demo", root)
