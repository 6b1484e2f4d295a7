"""The models that Ray Serve runs: which applications have one, their replicas, and the way to each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from serve_app.core.backend import Backend
from serve_app.core.cards import ReplicaCard
from serve_app.deployments.transport import RayBackend, by_value
from serve_app.router.discovery import Deployed, Sighting

MODEL_DEPLOYMENT = "Model"
GREETING_TIMEOUT_S = 1.5

COMING = {ApplicationStatus.NOT_STARTED, ApplicationStatus.DEPLOYING}
GOING = {ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.DELETING}


class ServeCluster:
    """Seen from inside a replica of the router's application.

    An application is named as the base model it serves; `serve_app check` sees to it. Before Serve has built an
    application nothing else is known of it.
    """

    def __init__(self, own_application: str) -> None:
        self._own_application = own_application
        self._handles: dict[str, DeploymentHandle[Any]] = {}
        self._is_deleted = False

    @property
    def is_deleted(self) -> bool:
        return self._is_deleted

    async def applications(self) -> Mapping[str, Deployed]:
        status = await asyncio.to_thread(serve.status)  # asks the controller, and blocks meanwhile
        own = status.applications.get(self._own_application)
        self._is_deleted = own is not None and own.status is ApplicationStatus.DELETING
        found = {
            name: Deployed(model=name, is_coming=application.status not in GOING)
            for name, application in status.applications.items()
            if name != self._own_application and _may_have_a_model(application)
        }
        self._handles = {name: handle for name, handle in self._handles.items() if name in found}
        return found

    async def greet(self, application: str, router_id: str, heard: Mapping[str, int]) -> Sighting:
        if application not in self._handles:
            handle = await asyncio.to_thread(serve.get_deployment_handle, MODEL_DEPLOYMENT, application)
            self._handles[application] = by_value(handle)
        answers = self._handles[application].broadcast("hello", router_id, dict(heard))
        try:
            results = await answers.results_async(timeout_s=GREETING_TIMEOUT_S, return_exceptions=True)
        except DeploymentUnavailableError:
            return Sighting(cards=(), is_complete=True)
        cards = tuple(result for result in results if isinstance(result, ReplicaCard))
        return Sighting(cards=cards, is_complete=len(cards) == len(results))

    def backend(self, application: str, replica_id: str) -> Backend:
        return RayBackend(self._handles[application], replica_id)


def _may_have_a_model(application: ApplicationStatusOverview) -> bool:
    if not application.deployments:
        return application.status in COMING
    return MODEL_DEPLOYMENT in application.deployments
