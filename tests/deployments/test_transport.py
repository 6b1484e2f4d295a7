"""What Ray reports becomes what the service says."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from serve_app.core.errors import ContextOverflow, EngineFailed, Overloaded, ReplicaLost
from serve_app.deployments.transport import as_serve_error


def raised_in_a_replica(cause: Exception) -> Exception:
    error: Exception = RayTaskError("submit", "Traceback", cause, ip="127.0.0.1").as_instanceof_cause()
    return error


def test_an_error_of_the_service_comes_back_as_itself_with_its_facts() -> None:
    refusal = ContextOverflow("too long", "prompt", {"n_ctx": 64})
    error = as_serve_error(raised_in_a_replica(refusal), "a")
    assert type(error) is ContextOverflow
    assert (error.message, error.param, error.facts) == ("too long", "prompt", {"n_ctx": 64})


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (ActorDiedError(), ReplicaLost),
        (ActorUnavailableError("cannot be reached", None), ReplicaLost),
        (BackPressureError(num_queued_requests=9, max_queued_requests=8), Overloaded),
        (raised_in_a_replica(ValueError("a mistake of ours")), EngineFailed),
    ],
)
def test_each_failure_of_ray_has_one_meaning(reported: Exception, expected: type[Exception]) -> None:
    assert type(as_serve_error(reported, "a")) is expected


def test_an_overload_says_when_to_come_back() -> None:
    error = as_serve_error(BackPressureError(num_queued_requests=9, max_queued_requests=8), "a")
    assert error.retry_after_s is not None


def test_a_deployment_that_is_away_is_a_lost_replica() -> None:
    from ray.serve._private.common import DeploymentID

    error = as_serve_error(DeploymentUnavailableError(DeploymentID("Model", "demo")), "a")
    assert type(error) is ReplicaLost
