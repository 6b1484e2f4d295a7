"""Checks how many replicas a deployment asks for, and says in one sentence how Serve will scale a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig

from serve_app.check.document import Finding, Path, Severity
from serve_app.deployments.autoscaling import POLICY, FollowWork
from serve_app.deployments.serve_cluster import MODEL_DEPLOYMENT

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
