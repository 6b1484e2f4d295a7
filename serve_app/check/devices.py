"""Compares the devices that a model is divided among with those that its replicas ask Ray for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from serve_app.check.findings import Finding, Path
from serve_app.deployments.arguments import ModelArgs
from serve_app.deployments.serve_cluster import MODEL_DEPLOYMENT


def check_devices(application: dict[str, Any], args: ModelArgs, path: Path) -> Iterator[Finding]:
    """A finding where `ray_actor_options` are written that leave a divided model without its GPUs."""
    deployments = application.get("deployments", [])
    if args.tensor_parallel == 1 or args.device == "cpu" or not isinstance(deployments, list):
        return
    for index, deployment in enumerate(deployments):
        options = deployment.get("ray_actor_options") if isinstance(deployment, dict) else None
        if not isinstance(options, dict) or deployment.get("name") != MODEL_DEPLOYMENT:
            continue
        asked = options.get("num_gpus", 0)
        if asked != args.tensor_parallel and (asked or args.device == "cuda"):
            message = (
                f"a replica asks for {asked} GPUs, and tensor_parallel divides its model among {args.tensor_parallel}:"
                f" write `num_gpus: {args.tensor_parallel}`"
            )
            yield Finding(path=(*path, "deployments", index, "ray_actor_options"), message=message)
