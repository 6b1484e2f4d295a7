"""What the builder behind an `import_path` takes and makes, found out without a cluster."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.deployment import Application, Deployment

from serve_app.deployments.ray_private import built_deployments, imported_as_by_serve


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
