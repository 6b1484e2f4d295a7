"""The entrance that an application of a model needs behind HAProxy, and nowhere else."""

from __future__ import annotations

from typing import Any

from ray.serve.handle import DeploymentHandle


class Front:
    """Makes the Model an inner deployment: behind HAProxy Serve refuses a request router of our own at an entrance.

    Nothing is sent through it, routers speak to the Model's replicas themselves.
    """

    def __init__(self, model: DeploymentHandle[Any]) -> None:
        self._model = model

    async def __call__(self) -> None:
        """Serve wants an entrance to be callable; this one has no route."""
