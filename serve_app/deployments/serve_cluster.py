"""The models that Ray Serve runs: which applications have one, their replicas, and the way to each."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from serve_app.core.backend import Backend
from serve_app.core.cards import ModelCard, ReplicaCard, Scale
from serve_app.deployments.arguments import ModelArgs
from serve_app.deployments.ray_private import application_overviews, deployed, may_sleep
from serve_app.deployments.transport import RayBackend, by_value
from serve_app.router.discovery import Deployed, Sighting

MODEL_DEPLOYMENT = "Model"
GREETING_TIMEOUT_S = 1.5
SCALES_S = 2.0
"""Between two questions for the replicas of all models: the answer is long, and looks may be seven a second."""
STARTING, DRAINING, RUNNING = {"STARTING", "UPDATING", "RECOVERING"}, {"STOPPING"}, {"RUNNING"}

COMING = {ApplicationStatus.NOT_STARTED, ApplicationStatus.DEPLOYING}
FAILED = ApplicationStatus.DEPLOY_FAILED


class ServeCluster:
    """Seen from inside a replica of the router's application.

    An application is named as the base model it serves; `serve_app check` sees to it. Before Serve has built an
    application nothing else is known of it.
    """

    def __init__(self, own_application: str) -> None:
        self._own_application = own_application
        self._handles: dict[str, DeploymentHandle[Any]] = {}
        self._running: set[str] = set()
        self._deployed: dict[str, tuple[int, list[str], dict[str, Any]]] = {}
        self._deployed_at = -math.inf
        self.is_deleted = False

    async def applications(self) -> Mapping[str, Deployed]:
        overviews = {each.name: each for each in await asyncio.to_thread(application_overviews)}
        own = overviews.get(self._own_application)
        self.is_deleted = own is not None and own.app_status.status is ApplicationStatus.DELETING
        if time.monotonic() - self._deployed_at > SCALES_S:
            self._deployed = await asyncio.to_thread(deployed, MODEL_DEPLOYMENT)
            self._deployed_at = time.monotonic()
        models = {
            name: _deployed(name, overview.app_status.status, self._deployed.get(name))
            for name, overview in overviews.items()
            if name != self._own_application and _may_have_a_model(overview)
        }
        self._running = {name for name in models if overviews[name].app_status.status is ApplicationStatus.RUNNING}
        self._handles = {name: handle for name, handle in self._handles.items() if name in models}
        return models

    async def greet(self, application: str, router_id: str, heard: Mapping[str, int]) -> Sighting:
        if application not in self._handles:
            handle = await asyncio.to_thread(serve.get_deployment_handle, MODEL_DEPLOYMENT, application)
            self._handles[application] = by_value(handle)
        answers = self._handles[application].broadcast("hello", router_id, dict(heard))
        try:
            results = await answers.results_async(timeout_s=GREETING_TIMEOUT_S, return_exceptions=True)
        except DeploymentUnavailableError:
            asleep = await asyncio.to_thread(self._sleeper, application) if application in self._running else None
            return Sighting(cards=(), is_complete=True, asleep=asleep)
        cards = tuple(result for result in results if isinstance(result, ReplicaCard))
        return Sighting(cards=cards, is_complete=len(cards) == len(results))

    def _sleeper(self, application: str) -> ModelCard | None:
        """Return what the cluster file says of a model that may sleep; None for one that may not. Blocks."""
        if not may_sleep(application, MODEL_DEPLOYMENT):
            return None
        try:
            named = {"name": application, "path": application}
            _, _, args = self._deployed.get(application, (0, [], {}))
            return ModelArgs.model_validate(named | args).card
        except ValidationError:  # of a builder that is not ours
            return ModelCard(name=application, root=application, created=0, max_model_len=0, vocab_size=0)

    async def wake(self, application: str, router_id: str) -> None:
        """Have Serve start a replica of a model that was scaled to zero; return once one has answered.

        The call is not pinned: Serve scales from zero by the calls that wait in a handle. It greets as the router
        does, so that the replica waits for nobody else to hear of its adapters.
        """
        await self._handles[application].options(method_name="hello").remote(router_id)

    def backend(self, application: str, replica_id: str) -> Backend:
        return RayBackend(self._handles[application], replica_id)


def _deployed(
    name: str, status: ApplicationStatus, found: tuple[int, Sequence[str], Mapping[str, Any]] | None
) -> Deployed:
    """found: as of `ray_private.deployed`; None where Serve has not told yet"""
    has_failed = status is FAILED
    is_coming = not has_failed and status is not ApplicationStatus.DELETING
    told = Deployed(model=name, is_coming=is_coming, has_failed=has_failed)
    if found is None:
        return told
    wanted, states, _ = found
    starting, draining, running = (sum(each in kinds for each in states) for kinds in (STARTING, DRAINING, RUNNING))
    return replace(told, scale=Scale(wanted=wanted, starting=starting, draining=draining), num_running=running)


def _may_have_a_model(overview: Any) -> bool:
    if not overview.deployment_statuses:
        return overview.app_status.status in {*COMING, FAILED}
    return any(each.name == MODEL_DEPLOYMENT for each in overview.deployment_statuses)
