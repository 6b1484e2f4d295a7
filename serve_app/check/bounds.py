"""Bounds on one request that a cluster file raises beyond what the service is tried with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from serve_app.deployments.arguments import LimitSettings, RouterSettings

BODY = "max_body_bytes"


def raised_bounds(content: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield the bounds that a cluster file of any shape raises: a setting's name, what was found, what is usual."""
    usual = {**LimitSettings().model_dump(), BODY: RouterSettings().max_body_bytes}
    for application in _mappings(content.get("applications")):
        for deployment in _mappings(application.get("deployments")):
            config = deployment.get("user_config")
            if isinstance(config, dict):
                limits = config.get("limits")
                for name, value in [*(limits.items() if isinstance(limits, dict) else ()), (BODY, config.get(BODY))]:
                    if isinstance(value, int) and value > usual.get(name, value):
                        yield name, value, usual[name]


def _mappings(found: object) -> Iterator[dict[str, Any]]:
    return (each for each in found if isinstance(each, dict)) if isinstance(found, list) else iter(())
