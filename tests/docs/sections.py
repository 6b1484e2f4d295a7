"""Which pages have sections that are written from the code, and who writes each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.docs import command_line, contract, dialects, operations
from tests.docs.laws import laws
from tests.docs.walls import walls

REPOSITORY = Path(__file__).parents[2]
PAGES = (
    *(
        REPOSITORY / "docs" / name
        for name in ("architecture.md", "cli.md", "contract.md", "engines.md", "laws.md", "operations.md")
    ),
    *(REPOSITORY / "docs" / "dialects" / f"{name}.md" for name in dialects.PAGES_OF.values()),
)

SECTIONS: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "walls": walls,
        "laws": laws,
        "parameters": contract.parameters,
        "names": contract.names,
        "defaults": contract.defaults,
        "ranges": contract.ranges,
        "meanings": contract.meanings,
        "refused": contract.refused,
        "ignored": contract.ignored,
        "prose": contract.prose,
        "tokenize": contract.tokenize,
        "embeddings": contract.embeddings,
        "scoring": contract.scoring,
        "infill": contract.infill,
        "chat": contract.chat,
        "responses": contract.responses,
        "errors": contract.errors,
        "model-settings": operations.model_settings,
        "router-args": operations.router_args,
        "router-settings": operations.router_settings,
        "tracing-settings": operations.tracing_settings,
        "rollout-settings": operations.rollout_settings,
        "limit-settings": operations.limit_settings,
        "cluster-environment": operations.cluster_environment,
        "local-environment": operations.local_environment,
        "haproxy-environment": operations.haproxy_environment,
        "commands": operations.commands,
        "engines": operations.engines,
        "command-tree": command_line.command_tree,
        "exit-codes": command_line.exit_codes,
        "metrics": operations.metrics,
        **dialects.sections(),
    }
)
