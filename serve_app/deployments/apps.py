"""The builders that a cluster file names by `import_path`: one application per base model, and one router.

Without `from __future__ import annotations`: Serve reads the annotation of `args` as it stands, and would hand a plain
dict to a builder whose annotation is a string.
"""

from functools import partial

from ray import serve
from ray.serve.config import AutoscalingConfig, BackpressureConfig, RequestRouterConfig

from serve_app.deployments.accounts import Accounts
from serve_app.deployments.arguments import ModelArgs, RouterArgs
from serve_app.deployments.loading import load_service
from serve_app.deployments.model import Front, Model
from serve_app.deployments.router import RouterReplica
from serve_app.deployments.serve_cluster import MODEL_DEPLOYMENT

PINNED_ROUTER = "serve_app.deployments.pinned_router.PinnedRouter"
ROUTER_DEPLOYMENT = "Router"
ACCOUNTS_DEPLOYMENT = "Accounts"
FRONT_DEPLOYMENT = "Front"

# A proxy that found the router full once waits longer and longer before it looks again, and does not forget that when
# it finds room: with Serve's default of up to half a second, one overload leaves the service at four requests per
# second until the proxy's queue is empty. The router refuses by itself long before that; this is for where it cannot.
PATIENT = RequestRouterConfig(initial_backoff_s=0.005, backoff_multiplier=1, max_backoff_s=0.01)

# To the accounts at once: with Serve's default of five, slow writes of the ledger would keep leases and claims waiting.
MAX_CALLS = 1024

NO_REPLICA = AutoscalingConfig(min_replicas=0, initial_replicas=0, max_replicas=1)
"""Serve starts a replica of such a deployment with its first request, and the Front gets none."""


def model(args: ModelArgs) -> serve.Application:
    """One base model with its adapters. Placement and limits belong in the cluster file."""
    pinned = RequestRouterConfig(request_router_class=PINNED_ROUTER)
    deployment = serve.deployment(
        Model, name=MODEL_DEPLOYMENT, request_router_config=pinned, ray_actor_options=_devices(args)
    )
    application = deployment.bind(partial(load_service, args))
    return serve.deployment(
        Front, name=FRONT_DEPLOYMENT, ray_actor_options={"num_cpus": 0}, autoscaling_config=NO_REPLICA
    ).bind(application)


def router(args: RouterArgs) -> serve.Application:
    """The service's HTTP entrance, which finds models by itself; with a store, its accounts beside it."""
    deployment = serve.deployment(
        serve.ingress()(RouterReplica),
        name=ROUTER_DEPLOYMENT,
        request_router_config=PATIENT,
        backpressure_config=BackpressureConfig(status_code=503, retry_after_s=2),
    )
    if args.store is None:
        return deployment.bind(None, args.adapters_file)
    accounts = serve.deployment(
        Accounts, name=ACCOUNTS_DEPLOYMENT, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=MAX_CALLS
    )
    bound = accounts.bind(args.store, args.pepper, args.ledger_days, args.files_days)
    return deployment.bind(bound, args.adapters_file, args.files)


def _devices(args: ModelArgs) -> dict[str, int]:
    """One replica owns the GPUs of all of its shards, and starts these as processes of its own on its node.

    Ray hides no GPU from a replica that asks for none: all replicas of a host would take the first one.
    """
    return {"num_gpus": args.tensor_parallel} if args.device == "cuda" else {}
