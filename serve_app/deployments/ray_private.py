"""All private parts of Ray that the service uses, seen in Ray 2.60. A public one replaces each as soon as there is one.

`pinned_router.py` overrides one more. Serve pickles that module by value, so it holds nothing else.
"""

from __future__ import annotations

from typing import Any

from ray._common.utils import import_attr
from ray._private.utils import get_num_cpus
from ray.serve._private.build_app import build_app
from ray.serve.context import _get_global_client
from ray.serve.deployment import Application, Deployment


def imported_as_by_serve(import_path: str) -> Any:
    """Return what the path leads to. Python's own `resolve_name` takes paths that Serve refuses.

    Raises whatever the import raises.
    """
    return import_attr(import_path)


def built_deployments(application: Application, name: str) -> list[Deployment]:
    """Return the deployments that Serve would create. The public `serve build` only writes a file of them."""
    return list(build_app(application, name=name).deployments)


def num_cpus_of_ray() -> float:
    """Return the CPUs that Ray would count here. Only a started Ray tells them publicly."""
    return float(get_num_cpus())


def http_host() -> str | None:
    """Return the host that Serve's proxies listen on; None where there is no HTTP. Asks the controller, and blocks.

    Nothing public tells it.
    """
    host: str | None = _get_global_client().http_config.host
    return host


def may_sleep(application: str, deployment: str) -> bool:
    """Return whether Serve may scale a deployment to zero. Asks the controller, and blocks.

    The public `serve.status` tells no settings.
    """
    info, _ = _get_global_client().get_deployment_info(deployment, application)
    scaling = info.deployment_config.autoscaling_config
    return scaling is not None and bool(scaling.min_replicas == 0)


def deployed(deployment: str) -> dict[str, tuple[int, list[str], dict[str, Any]]]:
    """Return how many replicas are wanted, their states and `args` of the cluster file, by application. Blocks.

    `serve.status` tells the states alone, and checks every setting anew for it.
    """
    applications = _get_global_client().get_serve_details()["applications"]
    return {
        name: (
            found["target_num_replicas"],
            [each["state"] for each in found["replicas"]],
            (each.get("deployed_app_config") or {}).get("args") or {},
        )
        for name, each in applications.items()
        if (found := each["deployments"].get(deployment)) is not None
    }


def application_overviews() -> list[Any]:
    """Return Serve's `StatusOverview` of every application. Asks the controller, and blocks meanwhile.

    `serve.status` tells the same, from every setting of every deployment, which it checks and pickles anew each time:
    while a model was coming, 2.6 to 3.3 s of a router's processor time instead of 1.0 to 1.2 s.
    """
    return list(_get_global_client().list_serve_statuses())
