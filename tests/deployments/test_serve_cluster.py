"""What is known of a model that Serve has scaled to zero."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import ApplicationStatus

from serve_app.core.cards import ModelCard
from serve_app.deployments import serve_cluster
from serve_app.deployments.serve_cluster import MODEL_DEPLOYMENT, ServeCluster


class WithoutReplicas:
    """A handle as Serve gives it."""

    def broadcast(self, *call: object) -> WithoutReplicas:
        return self

    async def results_async(self, **how: object) -> list[object]:
        raise DeploymentUnavailableError(None)


async def asleep(monkeypatch: pytest.MonkeyPatch, args: dict[str, Any]) -> ModelCard | None:
    """As a router hears of the model `demo` with these arguments, of which Serve keeps no replica."""
    status = SimpleNamespace(status=ApplicationStatus.RUNNING)
    overview = SimpleNamespace(name="demo", app_status=status, deployment_statuses=[SimpleNamespace(name="Model")])
    monkeypatch.setattr(serve_cluster, "application_overviews", lambda: [overview])
    monkeypatch.setattr(serve_cluster, "deployed", lambda deployment: {"demo": (0, [], args)})
    monkeypatch.setattr(serve_cluster, "may_sleep", lambda application, deployment: deployment == MODEL_DEPLOYMENT)
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *name: WithoutReplicas())
    monkeypatch.setattr(serve_cluster, "by_value", lambda handle: handle)
    cluster = ServeCluster("router")
    await cluster.applications()
    return (await cluster.greet("demo", "router-0", {})).asleep


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
