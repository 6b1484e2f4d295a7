"""Bounds on one request that a cluster file raises beyond what the service is tried with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.deployments.arguments import LimitSettings, RouterSettings

BODY = "max_body_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedBound:
    """name: of the setting"""

    name: str
    found: int
    usual: int


def raised_bounds(content: Mapping[str, Any]) -> Iterator[RaisedBound]:
    """Find the bounds that a cluster file of any shape raises."""
    usual = {**LimitSettings().model_dump(), BODY: RouterSettings().max_body_bytes}
    for config in _user_configs(content):
        limits = config.get("limits")
        given = {**(limits if isinstance(limits, dict) else {}), BODY: config.get(BODY)}
        for name, value in given.items():
            if isinstance(value, int) and value > usual.get(name, value):
                yield RaisedBound(name=name, found=value, usual=usual[name])


def _user_configs(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for application in _mappings(content.get("applications")):
        for deployment in _mappings(application.get("deployments")):
            if isinstance(config := deployment.get("user_config"), dict):
                yield config


def _mappings(found: object) -> Iterator[dict[str, Any]]:
    return (each for each in found if isinstance(each, dict)) if isinstance(found, list) else iter(())
