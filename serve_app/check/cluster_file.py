"""Checks a whole cluster file and says what is wrong on which line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.deployment import Application, Deployment
from ray.serve.schema import ServeDeploySchema

from serve_app.catalog.aliases import read_alias, read_aliases
from serve_app.catalog.files import CatalogError
from serve_app.catalog.resolve import PIN, Catalog
from serve_app.catalog.sources import is_address, missing_library, parse_source
from serve_app.check.document import Document, Finding, Path, Severity, UnreadableYaml, read_document, spelled
from serve_app.check.door import check_door, router_configs, routers_of
from serve_app.check.folders import check_device, check_model
from serve_app.check.keys import nearest, refused_open_values, refused_values, unknown_keys
from serve_app.check.memory import (
    Ask,
    Reservation,
    asks_of,
    check_devices,
    check_memory,
    check_scaling,
    check_schedule,
    reservation,
    this_machine,
)
from serve_app.core.cards import ModelCard
from serve_app.core.errors import ServeError
from serve_app.deployments.arguments import ModelArgs
from serve_app.deployments.ray_private import built_deployments, imported_as_by_serve

UNKNOWN: Mapping[str, str] = {}
"""Of an environment of which nothing is known."""
EVERY_MODEL = "*"
ON_SEVERAL_MACHINES = "EveryNode"
"""Written as `proxy_location`: what this machine lacks, another one may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Lines for a person, in the order of the file, and whether it can be served."""

    lines: tuple[str, ...]
    is_sound: bool


def check_file(name: str, *, environment: Mapping[str, str] = UNKNOWN, notes: Iterable[Finding] = ()) -> Report:
    """Check the cluster file of that name. Raises nothing: whatever is wrong is in the report.

    environment: that Ray is to be started in
    notes: of whoever asks, put among the others
    """
    try:
        document = read_document(FilePath(name).read_text(encoding="utf-8"))
    except OSError as error:
        return Report(lines=(f"{name}: error: cannot be read: {error.strerror}",), is_sound=False)
    except UnicodeDecodeError as error:
        return Report(lines=(f"{name}: error: is not UTF-8 text: {error.reason}",), is_sound=False)
    except UnreadableYaml as error:
        return Report(lines=(f"{name}:{error.line}: error: {error.message}",), is_sound=False)
    found = check_document(document, environment=environment)
    return _report(name, document, [*found, *notes])


def check_document(document: Document, *, environment: Mapping[str, str] = UNKNOWN) -> Iterator[Finding]:
    """Everything there is to say about the file."""
    data = document.data
    if not isinstance(data, dict):
        yield Finding(path=(), message="a cluster file is a mapping with `applications` in it")
        return
    yield from document.duplicates
    yield from unknown_keys(data, ServeDeploySchema, ())
    yield from refused_values(data, ServeDeploySchema, ())
    yield from refused_open_values(data, ServeDeploySchema, ())
    yield from check_door(data, environment=environment)
    applications = data.get("applications")
    if not isinstance(applications, list):
        return  # the schema has said so
    yield from _check_clashes(applications)
    here = Severity.WARNING if data.get("proxy_location") == ON_SEVERAL_MACHINES else Severity.ERROR
    models: list[ModelArgs] = []
    reservations: list[Reservation | None] = []
    asks: list[Ask] = []
    for index, application in enumerate(applications):
        if isinstance(application, dict):
            path: Path = ("applications", index)
            blueprint = yield from _check_application(application, path)
            asks += asks_of(application, (blueprint and blueprint.deployments) or {}, path)
            args = blueprint and blueprint.arguments
            if isinstance(args, ModelArgs):
                yield from check_device(args, (*path, "args"), severity=here)
                models.append(args)
                reservations.append(reservation(application, args, (*path, "args")))
    yield from check_names(data, models)
    yield from check_roots(data)
    yield from check_memory([each for each in reservations if each is not None], severity=here)
    if here is Severity.ERROR:
        yield from check_schedule(asks, this_machine())


def _check_clashes(applications: list[Any]) -> Iterator[Finding]:
    """Names and route prefixes that two applications share."""
    for key, default in (("name", "default"), ("route_prefix", "/")):
        first: dict[str, int] = {}
        for index, application in enumerate(applications):
            value = application.get(key, default) if isinstance(application, dict) else None
            if isinstance(value, str):
                if value in first:
                    message = f"{key} {value!r} is already that of applications[{first[value]}]"
                    yield Finding(path=("applications", index, key), message=message)
                first.setdefault(value, index)


def _check_application(application: dict[str, Any], path: Path) -> Generator[Finding, None, Blueprint | None]:
    """Returns what was built of it; None where nothing could be."""
    import_path, arguments = application.get("import_path"), application.get("args", {})
    if not isinstance(import_path, str):
        return None
    try:
        blueprint = read_blueprint(import_path, arguments, application=str(application.get("name")))
    except BuilderUnusable as error:
        yield Finding(path=(*path, "import_path"), message=str(error))
        return None
    if blueprint.schema is not None:
        yield from unknown_keys(arguments, blueprint.schema, (*path, "args"))
        yield from refused_values(arguments, blueprint.schema, (*path, "args"))
    if blueprint.deployments is not None:
        yield from _check_deployments(application, blueprint.deployments, path, is_ours=blueprint.schema is not None)
    if isinstance(blueprint.arguments, ModelArgs):
        yield from _check_model_application(application, blueprint.arguments, path)
        yield from check_devices(application, blueprint.arguments, path)
        yield from check_model(blueprint.arguments, (*path, "args"))
    return blueprint


def _check_deployments(
    application: dict[str, Any], known: Mapping[str, Deployment], path: Path, *, is_ours: bool
) -> Iterator[Finding]:
    deployments = application.get("deployments", [])
    if not isinstance(deployments, list):
        return
    seen: set[str] = set()
    for index, deployment in enumerate(deployments):
        name = deployment.get("name") if isinstance(deployment, dict) else None
        if not isinstance(name, str):
            continue
        here = (*path, "deployments", index)
        if name not in known:
            message = f"the application has no deployment {name!r}{nearest(name, known)}"
            yield Finding(path=(*here, "name"), message=message)
        elif name in seen:
            yield Finding(path=(*here, "name"), message=f"deployment {name!r} is given twice")
        seen.add(name)
        if is_ours:
            yield from check_scaling(deployment, here)
        schema = getattr(known[name].func_or_class, "user_config_schema", None) if name in known else None
        if schema is not None and deployment.get("user_config") is not None:
            yield from unknown_keys(deployment["user_config"], schema, (*here, "user_config"))
            yield from refused_values(deployment["user_config"], schema, (*here, "user_config"))


def _check_model_application(application: dict[str, Any], args: ModelArgs, path: Path) -> Iterator[Finding]:
    name = application.get("name", "default")
    if name != args.name:
        message = f"an application is named as its model: the application is {name!r}, the model {args.name!r}"
        yield Finding(path=(*path, "name"), message=message)
    if application.get("route_prefix", "/") is not None:
        message = "a model has no HTTP of its own, the router speaks for it: write `route_prefix: null`"
        yield Finding(path=(*path, "route_prefix"), message=message)


def _report(name: str, document: Document, findings: list[Finding]) -> Report:
    by_line = sorted(findings, key=lambda finding: document.line(finding.path))
    lines = []
    for finding in dict.fromkeys(by_line):
        place = f"{spelled(finding.path)}: " if finding.path else ""
        lines.append(f"{name}:{document.line(finding.path)}: {finding.severity}: {place}{finding.message}")
    num_errors = sum(finding.severity is Severity.ERROR for finding in set(findings))
    num_warnings = sum(finding.severity is Severity.WARNING for finding in set(findings))
    lines.append(f"{name}: {_counted(num_errors, 'error')}, {_counted(num_warnings, 'warning')}")
    return Report(lines=tuple(lines), is_sound=num_errors == 0)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


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
    cards = {args.name: args.card for args in models}  # a name that is given twice is told already
    for path, application in routers if models else ():
        for here, config in router_configs(application, path):
            yield from _check_aliases(_named(config.get("aliases")), list(cards.values()), (*here, "aliases"))
            yield from _check_prices(config.get("prices"), list(cards.values()), (*here, "prices"))


def check_roots(data: dict[str, Any]) -> Iterator[Finding]:
    """Yield a note or a warning for each place below which adapters may be published: can this machine read it?"""
    for path, application in routers_of(data):
        for here, config in router_configs(application, path):
            roots = config.get("adapter_roots")
            for number, root in enumerate(roots if isinstance(roots, list) else ()):
                if isinstance(root, str):
                    yield from _check_root(root, (*here, "adapter_roots", number))


def _check_root(root: str, path: Path) -> Iterator[Finding]:
    if not is_address(root):
        if not FilePath(root).is_dir():
            yield Finding(path=path, message=f"this machine has no folder {root}", severity=Severity.WARNING)
        return
    try:
        scheme = parse_source(root).scheme
    except CatalogError:
        return  # the schema has said so
    command = missing_library(scheme)
    if command is None:
        yield Finding(path=path, message=f"this machine can fetch {scheme}://", severity=Severity.NOTE)
    else:
        message = f"this machine cannot fetch {scheme}:// yet: run `{command}` on it"
        yield Finding(path=path, message=message, severity=Severity.WARNING)


def _check_aliases(said: Mapping[str, object], cards: Sequence[ModelCard], path: Path) -> Iterator[Finding]:
    try:
        catalog = Catalog(cards, read_aliases({name: each for name, each in said.items() if _is_alias(each)}))
    except CatalogError as error:
        yield Finding(path=path, message=str(error))
        return
    for name in catalog.hidden_aliases:
        message = f"{name!r} is the name of a model already, which answers to it: give the alias another name"
        yield Finding(path=(*path, name), message=message)
    for name, alias in catalog.aliases.items():
        here = (*path, name)
        for target in alias.weights:
            yield from _check_target(catalog, target, (*here, *_steps_to(target, said[name])))
        for target in alias.shadow:
            yield from _check_target(catalog, target, (*here, "shadow", target))
        if alias.is_weighted or alias.shadow:
            yield Finding(path=here, message=alias.told(), severity=Severity.NOTE)


def _check_target(catalog: Catalog, target: str, path: Path) -> Iterator[Finding]:
    """Report what an alias leads to and nobody serves. Versions and published adapters are known to replicas alone."""
    try:
        catalog.resolve(target)
    except ServeError as error:
        if PIN not in target:
            base, _, adapter = target.partition(":")
            may_come = bool(adapter) and base in catalog.models
            what = "nobody serves until it is published" if may_come else "is nothing that is served"
            severity = Severity.WARNING if may_come else Severity.ERROR
            yield Finding(path=path, message=f"leads to {target!r}, which {what}: {error}", severity=severity)
        elif target.partition(":")[0] not in catalog.models:
            yield Finding(path=path, message=f"leads to {target!r}, and no model of this file has that name")


def _steps_to(target: str, said: object) -> Path:
    """Return where in an alias this target stands."""
    if not isinstance(said, dict):
        return ()
    return (target,) if target in said else ("to", *_steps_to(target, said.get("to")))


def _is_alias(said: object) -> bool:
    """Whether the schema accepts it; what else is there it has refused already."""
    try:
        read_alias(said)
    except CatalogError:
        return False
    return True


def _check_prices(prices: object, cards: Sequence[ModelCard], path: Path) -> Iterator[Finding]:
    known = Catalog(cards).names()
    for name in prices if isinstance(prices, dict) else ():
        if name != EVERY_MODEL and name not in known:
            message = f"is no model of this file, so nothing has this price; known: {', '.join([*known, EVERY_MODEL])}"
            yield Finding(path=(*path, str(name)), message=message)


def _named(found: object) -> dict[str, object]:
    return {name: each for name, each in found.items() if isinstance(name, str)} if isinstance(found, dict) else {}


class BuilderUnusable(Exception):
    """The import path leads to nothing that Serve could build an application with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """An application as its builder makes it.

    arguments:   validated, None where they were refused or the builder declares no model for them
    deployments: by name; None where the application could not be built
    """

    schema: type[BaseModel] | None
    arguments: BaseModel | None
    deployments: Mapping[str, Deployment] | None


def read_blueprint(import_path: str, raw_arguments: Any, *, application: str) -> Blueprint:
    """Import the builder and build with these arguments, as Serve would. Raises BuilderUnusable."""
    target = _imported(import_path)
    if isinstance(target, Application):
        return Blueprint(schema=None, arguments=None, deployments=_deployments(target, application))
    schema = _argument_schema(target)
    arguments = None
    if schema is not None:
        try:
            arguments = schema.model_validate(raw_arguments)
        except ValidationError:
            return Blueprint(schema=schema, arguments=None, deployments=None)
    try:
        built = target(arguments if schema is not None else raw_arguments)
    except Exception as error:
        raise BuilderUnusable(f"{import_path} raised {type(error).__name__}: {error}") from error
    if not isinstance(built, Application):
        raise BuilderUnusable(f"{import_path} made a {type(built).__name__}, not a Serve application")
    return Blueprint(schema=schema, arguments=arguments, deployments=_deployments(built, application))


def _imported(import_path: str) -> Any:
    try:
        target = imported_as_by_serve(import_path)
    except Exception as error:
        raise BuilderUnusable(f"{import_path!r} cannot be imported: {error}") from error
    if not isinstance(target, Application) and not inspect.isfunction(target):
        raise BuilderUnusable(f"{import_path!r} is a {type(target).__name__}, not a builder or an application")
    return target


def _argument_schema(builder: Callable[..., Any]) -> type[BaseModel] | None:
    """The pydantic model that the builder's only parameter is annotated with."""
    parameters = list(inspect.signature(builder).parameters.values())
    if len(parameters) != 1:
        raise BuilderUnusable(f"a builder takes exactly one parameter, {builder.__name__} takes {len(parameters)}")
    annotation = parameters[0].annotation  # a string is no model to Serve either
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_model else None


def _deployments(application: Application, name: str) -> Mapping[str, Deployment]:
    return {each.name: each for each in built_deployments(application, name)}
