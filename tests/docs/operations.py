"""The tables of docs/operations.md: settings with their defaults, the environment of a cluster, commands, metrics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import fields

from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from starlette.requests import Request

from serve_app.backends.vllm.engine import CAPABILITIES
from serve_app.cli.environment import HAPROXY_SETTINGS, LOCAL_SETTINGS, SETTINGS, Setting
from serve_app.cli.tree import command
from serve_app.core.cards import EVERYTHING
from serve_app.deployments.arguments import (
    CanarySettings,
    LimitSettings,
    ModelArgs,
    RouterArgs,
    RouterSettings,
    TracingSettings,
)
from serve_app.http.metrics import Metrics
from serve_app.router.admission import Admission
from serve_app.router.fleet import Fleet
from serve_app.router.publishing import Publishing
from serve_app.router.rollouts import Rollouts
from tests.docs.contract import shown
from tests.docs.docstrings import told_of_settings
from tests.docs.markdown import code, table


def model_settings() -> str:
    """`args` of a model."""
    return _settings(ModelArgs)


def engines() -> str:
    """What a request may need of an engine, and which engine has it, as their cards say."""
    rows = []
    for group in fields(EVERYTHING):
        every, of_vllm = getattr(EVERYTHING, group.name), getattr(CAPABILITIES, group.name)
        for kinds, word in ((every & of_vllm, "carried out"), (every - of_vllm, "refused by name")):
            if kinds:
                rows.append([group.name, ", ".join(map(code, sorted(kinds))), "carried out", word])
    return table(["", "what a request needs", code("own"), code("vllm")], rows)


def router_args() -> str:
    """`args` of the router."""
    return _settings(RouterArgs)


def router_settings() -> str:
    """`user_config` of the router, without what has tables of its own."""
    return _settings(RouterSettings, without=("limits", "rollout"))


def rollout_settings() -> str:
    """`rollout` within it."""
    return _settings(CanarySettings)


def tracing_settings() -> str:
    """`tracing` within it."""
    return _settings(TracingSettings)


def limit_settings() -> str:
    """`limits` within it."""
    return _settings(LimitSettings)


def cluster_environment() -> str:
    return _environment(SETTINGS)


def local_environment() -> str:
    return _environment(LOCAL_SETTINGS)


def haproxy_environment() -> str:
    return _environment(HAPROXY_SETTINGS)


def commands() -> str:
    """Subcommands of `serve_app`."""
    return table(["command", "what it does"], [[code(f"serve_app {name}"), text] for name, text in subcommands()])


def metrics() -> str:
    """Every series of /metrics."""
    fleet = Fleet("router-0")
    rollouts = Rollouts(Publishing(fleet), fleet)
    counted = Metrics(fleet, admission=Admission(lambda: fleet.rooms), rollouts=rollouts, tallies={})
    answer = asyncio.run(counted.answer(Request({"type": "http"})))
    families = text_string_to_metric_families(bytes(answer.body).decode())
    rows = {
        (each.name + ("_total" if each.type == "counter" else ""), each.type, each.documentation)
        for each in families
        if not each.name.endswith("_created")
    }
    return table(["series", "kind", "what it tells"], [[code(name), kind, text] for name, kind, text in sorted(rows)])


def subcommands() -> Iterator[tuple[str, str]]:
    """Name and help of each that `serve_app` has at its top."""
    for name, each in command().commands.items():
        yield name, each.help.removesuffix(".")


def _settings(model: type[BaseModel], *, without: tuple[str, ...] = ()) -> str:
    told = told_of_settings(model)
    rows = []
    for name, field in model.model_fields.items():
        if name not in without:
            value = field.get_default(call_default_factory=True)
            default = "required" if field.is_required() else code(shown(_plain(value)))
            meaning = told.get(name, field.description or "")
            rows.append([code(name), default, re.sub(r"\bNone\b", "null", meaning)])
    return table(["key", "default", "meaning"], rows)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _environment(settings: tuple[Setting, ...]) -> str:
    return table(["variable", "value", "why"], [[code(each.name), code(each.value), each.reason] for each in settings])
