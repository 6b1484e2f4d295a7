"""Compares what models take, memory, CPUs, GPUs and replicas, with what this machine has; says how Serve scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError
from ray.serve import Deployment
from ray.serve.config import AutoscalingConfig

from serve_app.catalog.files import CatalogError
from serve_app.check.document import Finding, Path, Severity
from serve_app.check.door import deployments_of
from serve_app.check.folders import Needs, needs_of
from serve_app.deployments.apps import FRONT_DEPLOYMENT
from serve_app.deployments.arguments import ModelArgs
from serve_app.deployments.autoscaling import POLICY, FollowWork
from serve_app.deployments.ray_private import num_cpus_of_ray
from serve_app.deployments.serve_cluster import MODEL_DEPLOYMENT
from serve_app.engine.kv.budget import ROOT, free_host_bytes

CONFIG = "autoscaling_config"
NUMBER = "num_replicas"


def check_scaling(deployment: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    """Refuse to have Serve choose the number of replicas by calls; explain what it does with a model by our policy."""
    if deployment.get(NUMBER) == "auto":
        yield Finding(path=(*path, NUMBER), message=_by_calls(deployment))
    config = deployment.get(CONFIG)
    if config is None:
        return
    policy = config.get("policy") if isinstance(config, dict) else None
    given = policy if isinstance(policy, dict) else {}
    if deployment.get("name") != MODEL_DEPLOYMENT or given.get("policy_function") != POLICY:
        yield Finding(path=(*path, CONFIG), message=_by_calls(deployment))
        return
    if deployment.get(NUMBER) is not None:
        message = f"Serve takes either `{NUMBER}` or `{CONFIG}`: leave out `{NUMBER}`, and write `initial_replicas: N`"
        yield Finding(path=(*path, NUMBER), message=message)
    try:
        rule = FollowWork(**given.get("policy_kwargs") or {})
        scaling = AutoscalingConfig.model_validate(config)
    except (ValueError, TypeError) as error:
        if not isinstance(error, ValidationError):  # the schema has said it
            message = f"{str(error).removeprefix('FollowWork.__init__() ')}; known: target_share, target_wait_s"
            yield Finding(path=(*path, CONFIG, "policy", "policy_kwargs"), message=message)
        return
    yield Finding(path=(*path, CONFIG), message=_told(scaling, rule), severity=Severity.NOTE)


def most_replicas(deployment: Mapping[str, Any], default: object) -> object:
    """Return the most replicas that a deployment in a cluster file may have at once."""
    config = deployment.get(CONFIG)
    if isinstance(config, dict):
        return config.get("max_replicas", 1)
    return deployment.get(NUMBER, default)


def _by_calls(deployment: Mapping[str, Any]) -> str:
    calls = (
        "Serve scales by the calls that it sees, and sees one of each router however many requests there are: it would"
        " never scale a model down, nor up from zero. Write `num_replicas: N` instead"
    )
    if deployment.get("name") != MODEL_DEPLOYMENT:
        return calls
    return f"{calls}, or `{CONFIG}` with `policy: {{policy_function: {POLICY}}}`"


def _told(scaling: AutoscalingConfig, rule: FollowWork) -> str:
    asleep_s = scaling.downscale_to_zero_delay_s
    asleep_s = scaling.downscale_delay_s if asleep_s is None else asleep_s
    last = f", and the last one after {asleep_s:g} s without a request" if scaling.min_replicas == 0 else ""
    return (
        f"Serve keeps {scaling.min_replicas} to {scaling.max_replicas} replicas: it adds some once their sequences or"
        f" KV cache are {rule.target_share:.0%} in use, or a request waits longer than {rule.target_wait_s:g} s, for"
        f" {scaling.upscale_delay_s:g} s; it drains those that are not needed for {scaling.downscale_delay_s:g} s{last}"
    )


GIB = 1 << 30
GPU_DEVICES = "dev/nvidia[0-9]*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What the replicas of one model hold in host memory, if all run on this machine. needs: of each"""

    path: Path
    num_replicas: int
    kv_cache_bytes: int
    needs: Needs
    name: str = "this model"

    @property
    def parts(self) -> str:
        """What a replica takes, and for what."""
        adapters = f", {_gib(self.needs.adapter_bytes)} of adapters" if self.needs.adapter_bytes else ""
        return (
            f"{_gib(self.kv_cache_bytes)} of kv_cache_bytes, {_gib(self.needs.weight_bytes)} of weights{adapters},"
            f" {_gib(self.needs.own_bytes)} for steps and libraries"
        )

    @property
    def num_bytes(self) -> int:
        return self.num_replicas * self.bytes_of_one

    @property
    def bytes_of_one(self) -> int:
        """What one of its replicas holds."""
        needs = self.needs
        return self.kv_cache_bytes + needs.weight_bytes + needs.own_bytes + needs.adapter_bytes


def check_memory(
    reservations: Sequence[Reservation], *, severity: Severity = Severity.ERROR, root: FilePath = ROOT
) -> Iterator[Finding]:
    """Report each model whose `kv_cache_bytes` does not fit even alone, as an error. If all models fit alone but not
    together, warn at each.

    severity: in the place of an error
    """
    available = free_host_bytes(root)
    if available is None:
        return
    too_large = [each for each in reservations if each.bytes_of_one > available]
    for each in too_large:
        message = (
            f"one replica of {each.name} takes {_gib(each.bytes_of_one)} ({each.parts}), and this machine has"
            f" {_gib(available)} left: lower it, or write `auto`"
        )
        yield Finding(path=(*each.path, "kv_cache_bytes"), message=message, severity=severity)
    needed = sum(each.num_bytes for each in reservations)
    for each in reservations if needed > available and not too_large else ():
        message = (
            f"{each.num_replicas} × ({each.parts}) is {_gib(each.num_bytes)}; all models together want {_gib(needed)},"
            f" and this machine has {_gib(available)} left"
        )
        yield Finding(path=(*each.path, "kv_cache_bytes"), message=message, severity=Severity.WARNING)


def reservation(
    application: Mapping[str, Any], args: ModelArgs, path: Path, *, root: FilePath = ROOT
) -> Reservation | None:
    """That of a model whose keys and values are kept in host memory in an amount that the file says."""
    is_on_gpu = args.device == "cuda" or (args.device == "auto" and any(root.glob(GPU_DEVICES)))
    if is_on_gpu or not isinstance(args.kv_cache_bytes, int):
        return None
    return Reservation(
        path=path,
        num_replicas=_num_replicas(application.get("deployments")),
        kv_cache_bytes=args.kv_cache_bytes,
        needs=_needs(args),
        name=args.name,
    )


def _num_replicas(deployments: Any) -> int:
    """The most that the file asks for."""
    found = [1]
    for each in deployments if isinstance(deployments, list) else []:
        if isinstance(each, dict):
            wanted = most_replicas(each, 1)
            found += [wanted] if isinstance(wanted, int) else []
    return max(found)


def _needs(args: ModelArgs) -> Needs:
    """Nothing where the model is refused, as `check_model` says so."""
    from serve_app.engine.decoder.text_part import ModelNotSupported  # imported here: it brings torch, which takes time

    try:
        return needs_of(args)
    except (CatalogError, ModelNotSupported, OSError):
        return Needs(weight_bytes=0, own_bytes=0, adapter_bytes=0)


def _gib(number: int) -> str:
    return f"{number / GIB:.1f} GiB"


DEFAULTS: Mapping[str, float] = {"num_cpus": 1, "num_gpus": 0}
"""What Serve asks for a replica where nothing is written."""
WORDS = {"num_cpus": "CPUs", "num_gpus": "GPUs"}
TOLERANCE = 1e-6
SHARES_A_GPU = (
    "device is cuda, and what is written here replaces the builder's `num_gpus: 1`: all replicas of a machine would"
    " share its first GPU. Add `num_gpus: 1`; 0.5 has two replicas share one GPU, 0 leaves it as it is"
)


def check_devices(application: dict[str, Any], args: ModelArgs, path: Path) -> Iterator[Finding]:
    """A finding where `ray_actor_options` are written that leave a model without its GPUs."""
    deployments = application.get("deployments", [])
    if args.device == "cpu" or not isinstance(deployments, list):
        return
    for index, deployment in enumerate(deployments):
        options = deployment.get("ray_actor_options") if isinstance(deployment, dict) else None
        if not isinstance(options, dict) or deployment.get("name") != MODEL_DEPLOYMENT:
            continue
        here, asked = (*path, "deployments", index, "ray_actor_options"), options.get("num_gpus", 0)
        if args.tensor_parallel == 1:
            if args.device == "cuda" and "num_gpus" not in options:
                yield Finding(path=here, message=SHARES_A_GPU, severity=Severity.WARNING)
        elif asked != args.tensor_parallel and (asked or args.device == "cuda"):
            message = (
                f"a replica asks for {asked} GPUs, and tensor_parallel divides its model among {args.tensor_parallel}:"
                f" write `num_gpus: {args.tensor_parallel}`"
            )
            yield Finding(path=here, message=message)


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
        if name == FRONT_DEPLOYMENT:  # it gets no replica
            continue
        index, entry = next(deployments_of(application, name), (None, {}))
        options, number = entry.get("ray_actor_options"), most_replicas(entry, deployment.num_replicas)
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
    return {"num_cpus": num_cpus_of_ray(), "num_gpus": len(list(ROOT.glob(GPU_DEVICES)))}
