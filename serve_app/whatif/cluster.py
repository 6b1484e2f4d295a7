"""Reads of a cluster file what a simulation needs: one model's settings, its replicas, and the router's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from serve_app.check.document import UnreadableYaml, read_document
from serve_app.deployments.arguments import ModelArgs, RouterSettings
from serve_app.router.placement import PlacementPolicy
from serve_app.whatif.costs import StepCosts
from serve_app.whatif.errors import Unusable
from serve_app.whatif.simulation import Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """A model of a cluster file. num_replicas: as written, of an autoscaled one the most"""

    args: ModelArgs
    service: Service
    num_replicas: int
    policy: PlacementPolicy


def read_cluster(file: str, costs: StepCosts, *, model: str | None = None) -> Deployed:
    """Return one model of the file. model: its name; None is the first. Raises Unusable."""
    try:
        applications = read_document(Path(file).read_text(encoding="utf-8")).data["applications"]
        models = {each["args"]["name"]: each for each in applications if "name" in (each.get("args") or {})}
        routers = [each for each in applications if "name" not in (each.get("args") or {})]
        name = next(iter(models), "") if model is None else model
        if name not in models:
            raise Unusable(f"{file} has no model {name!r}; it has {', '.join(models) or 'none'}")
        settings = RouterSettings.model_validate(_of(routers, "Router").get("user_config") or {})
        arguments = ModelArgs.model_validate(models[name]["args"])
    except (OSError, UnicodeDecodeError, UnreadableYaml, ValidationError) as error:
        raise Unusable(f"{file} cannot be used: {error}") from error
    except (TypeError, KeyError, AttributeError) as error:
        raise Unusable(f"{file} is no cluster file; `serve_app check {file}` says what it lacks") from error
    scaling = _of([models[name]], "Model")
    most = (scaling.get("autoscaling_config") or {}).get("max_replicas") or scaling.get("num_replicas") or 1
    service = Service(config=arguments, costs=costs, admission=settings)
    return Deployed(args=arguments, service=service, num_replicas=int(most), policy=settings.placement)


def _of(applications: list[Any], deployment: str) -> dict[str, Any]:
    """Return what is written of the first deployment of that name."""
    found = (each for application in applications for each in application.get("deployments") or ())
    return next((each for each in found if each.get("name") == deployment), {})
