"""Checks that what a cluster file calls by name is there: a router, and the models of aliases and prices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from serve_app.catalog.files import CatalogError
from serve_app.catalog.resolve import Catalog
from serve_app.check.door import deployments_of, routers_of
from serve_app.check.findings import Finding, Path
from serve_app.core.cards import AdapterCard, ModelCard
from serve_app.core.errors import ServeError
from serve_app.deployments.apps import ROUTER_DEPLOYMENT
from serve_app.deployments.arguments import ModelArgs

EVERY_MODEL = "*"


def check_names(data: dict[str, Any], models: Sequence[ModelArgs]) -> Iterator[Finding]:
    """Yield what nobody could ask for, and what would lead nowhere; of names nothing is said where no model is."""
    routers = list(routers_of(data))
    applications = [each for each in data["applications"] if isinstance(each, dict)]
    if not routers and all(each.get("route_prefix", "/") is None for each in applications):
        message = (
            "no application is a router, so nobody could ask for anything: add one with `import_path:"
            " serve_app.deployments.apps:router` and `route_prefix: /`, as in the repository's cluster.yaml"
        )
        yield Finding(path=("applications",), message=message)
    cards = {args.name: _card(args) for args in models}  # a name that is given twice is told already
    for path, application in routers if models else ():
        for index, deployment in deployments_of(application, ROUTER_DEPLOYMENT):
            config = deployment.get("user_config")
            if isinstance(config, dict):
                here = (*path, "deployments", index, "user_config")
                yield from _check_aliases(_texts(config.get("aliases")), list(cards.values()), (*here, "aliases"))
                yield from _check_prices(config.get("prices"), list(cards.values()), (*here, "prices"))


def _check_aliases(aliases: Mapping[str, str], cards: Sequence[ModelCard], path: Path) -> Iterator[Finding]:
    try:
        catalog = Catalog(cards, aliases)
    except CatalogError as error:
        yield Finding(path=path, message=str(error))
        return
    for alias in catalog.hidden_aliases:
        message = f"{alias!r} is the name of a model already, which answers to it: give the alias another name"
        yield Finding(path=(*path, alias), message=message)
    for alias, target in catalog.aliases.items():
        try:
            catalog.resolve(alias)
        except ServeError as error:
            yield Finding(path=(*path, alias), message=f"leads to {target!r}, which is nothing that is served: {error}")


def _check_prices(prices: object, cards: Sequence[ModelCard], path: Path) -> Iterator[Finding]:
    known = Catalog(cards).names()
    for name in prices if isinstance(prices, dict) else ():
        if name != EVERY_MODEL and name not in known:
            message = f"is no model of this file, so nothing has this price; known: {', '.join([*known, EVERY_MODEL])}"
            yield Finding(path=(*path, str(name)), message=message)


def _card(args: ModelArgs) -> ModelCard:
    """What names need of it; whether an adapter can be used is told elsewhere."""
    folder = FilePath(args.adapters) if args.adapters is not None else None
    found = sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder and folder.is_dir() else ()
    adapters = tuple(AdapterCard(name=name, version=name) for name in found)
    return ModelCard(name=args.name, root=args.path, created=0, max_model_len=0, vocab_size=0, adapters=adapters)


def _texts(found: object) -> dict[str, str]:
    pairs = found.items() if isinstance(found, dict) else ()
    return {name: target for name, target in pairs if isinstance(name, str) and isinstance(target, str)}
