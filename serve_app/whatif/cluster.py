"""Reads of a cluster file what a simulation needs: one model's settings, its replicas, and the router's settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from serve_app.check.document import UnreadableYaml, read_document
from serve_app.check.door import deployments_of, router_configs, routers_of
from serve_app.check.memory import most_replicas
from serve_app.deployments.arguments import ModelArgs, RouterSettings
from serve_app.deployments.serve_cluster import MODEL_DEPLOYMENT
from serve_app.whatif.costs import StepCosts
from serve_app.whatif.simulation import Service
from serve_app.whatif.trace import Unusable


def read_cluster(file: str, costs: StepCosts, *, model: str | None = None) -> Service:
    """Return one model of the file. model: its name; None is the first. Raises Unusable."""
    try:
        data = read_document(Path(file).read_text(encoding="utf-8")).data
        models = {each["args"]["name"]: each for each in data["applications"] if "name" in (each.get("args") or {})}
        name = next(iter(models), "") if model is None else model
        if name not in models:
            raise Unusable(f"{file} has no model {name!r}; it has {', '.join(models) or 'none'}")
        written = (config for path, each in routers_of(data) for _, config in router_configs(each, path))
        settings = RouterSettings.model_validate(next(written, {}))
        arguments = ModelArgs.model_validate(models[name]["args"])
    except (OSError, UnicodeDecodeError, UnreadableYaml, ValidationError) as error:
        raise Unusable(f"{file} cannot be used: {error}") from error
    except (TypeError, KeyError, AttributeError) as error:
        raise Unusable(f"{file} is no cluster file; `serve_app check {file}` says what it lacks") from error
    most = most_replicas(next((each for _, each in deployments_of(models[name], MODEL_DEPLOYMENT)), {}), 1) or 1
    if not str(most).isdecimal():
        what = f"num_replicas of {name!r}, or max_replicas, must be a whole number to simulate; found {most!r}"
        raise Unusable(f"{file} cannot be used: {what}")
    return Service(
        config=arguments, costs=costs, admission=settings, num_replicas=int(str(most)), policy=settings.placement
    )
