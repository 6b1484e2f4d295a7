"""Compares what replicas ask Ray for with what their models are divided among, and with what this machine has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ray._private.utils import get_num_cpus
from ray.serve import Deployment

from serve_app.check.door import deployments_of
from serve_app.check.findings import Finding, Path, Severity
from serve_app.check.memory import GPU_DEVICES
from serve_app.deployments.arguments import ModelArgs
from serve_app.deployments.serve_cluster import MODEL_DEPLOYMENT
from serve_app.engine.kv.budget import ROOT

DEFAULTS: Mapping[str, float] = MappingProxyType({"num_cpus": 1, "num_gpus": 0})
"""What Serve asks for a replica where nothing is written."""
WORDS = MappingProxyType({"num_cpus": "CPUs", "num_gpus": "GPUs"})
TOLERANCE = 1e-6


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What the replicas of one deployment ask Ray for, each of them. path: of the deployment"""

    path: Path
    name: str
    num_replicas: int
    options: Mapping[str, Any]

    def each(self, key: str) -> float:
        found = self.options.get(key, DEFAULTS[key])
        return found if isinstance(found, int | float) else 0.0


def asks_of(application: Mapping[str, Any], built: Mapping[str, Deployment], path: Path) -> Iterator[Ask]:
    """Yield an ask for each deployment, as its builder has it and the file changes it."""
    for name, deployment in built.items():
        index, entry = next(deployments_of(application, name), (None, {}))
        options, number = entry.get("ray_actor_options"), entry.get("num_replicas", deployment.num_replicas)
        yield Ask(
            path=path if index is None else (*path, "deployments", index),
            name=f"{application.get('name', 'default')}'s {name}",
            num_replicas=number if isinstance(number, int) else 1,
            options=options if isinstance(options, dict) else deployment.ray_actor_options or {},
        )


def check_schedule(asks: Sequence[Ask], machine: Mapping[str, float]) -> Iterator[Finding]:
    """Warn of replicas that Ray cannot place, all being on one machine: they would wait for ever.

    machine: what it has, by the keys of DEFAULTS
    """
    for key, num in machine.items():
        what, left = WORDS[key], num
        for ask in asks:
            wanted = ask.num_replicas * ask.each(key)
            if ask.each(key) > num:
                told = f"each replica of {ask.name} asks for {ask.each(key):g} {what}"
            elif wanted > left + TOLERANCE:
                told = (
                    f"with {ask.num_replicas} replicas of {ask.name} at {ask.each(key):g} all up to here ask for"
                    f" {num - left + wanted:g} {what}"
                )
            else:
                left -= wanted
                continue
            message = (
                f"{told}, and this machine has {num:g}: under `serve_app up` some would wait for ever. Lower `{key}`,"
                " which is what Ray sets aside and no bound on what is used, or `num_replicas`"
            )
            yield Finding(path=(*ask.path, "ray_actor_options"), message=message, severity=Severity.WARNING)
            break


def this_machine() -> Mapping[str, float]:
    """Return what Ray would find here."""
    return {"num_cpus": get_num_cpus(), "num_gpus": len(list(ROOT.glob(GPU_DEVICES)))}
