"""Carries the calls of a router to one replica over Ray, and the replica's packed frames back."""

from __future__ import annotations

import pickle  # nosec B403 # what Ray carries between ours
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import fields
from operator import attrgetter
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.core.adapters import AdapterSet
from serve_app.core.backend import NOTHING, may_take_long
from serve_app.core.cards import AdapterCard, ModelCard, ReplicaCard
from serve_app.core.delta import Delta, Frame, Load
from serve_app.core.errors import EngineFailed, Overloaded, ReplicaLost, ServeError, Unavailable
from serve_app.core.ledger import Spent
from serve_app.core.progress import Past
from serve_app.core.prompt import Tokenization, TokenizeRequest
from serve_app.core.request import GenerationRequest
from serve_app.router.patience import patience

CALL_TIMEOUT_S = 30.0
"""A replica that has not answered a call for so long counts as lost."""
PATIENT_TIMEOUT_S = 600.0
"""The same of requests with images or long texts, which it takes in when it has seen all of them and cut them into
tokens, beside everything else it computes and behind what others sent. One that is lost meanwhile is known by its
frames, which end."""


class RayBackend:
    """A replica as a Backend: every call reaches it or fails, with ReplicaLost where it is gone.

    handle: of the Model deployment, whose request router is PinnedRouter

    Calls are made in an empty context. In that of an HTTP request Serve would give all of them the request's own id,
    by which PinnedRouter tells waiting calls apart, and would cancel them with the request.
    """

    def __init__(self, handle: DeploymentHandle[Any], replica_id: str, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._replica_id = replica_id
        self._timeout_s = timeout_s
        pinned = by_value(handle).options(session_id=replica_id)
        self._hello = pinned.options(method_name="hello")
        self._attach = pinned.options(method_name="attach", stream=True)
        self._submit = pinned.options(method_name="submit")
        self._any = pinned.options(method_name="call")

    async def hello(self, router_id: str, heard: Mapping[str, int] = NOTHING) -> ReplicaCard:
        card: ReplicaCard = await self._call(self._hello, router_id, dict(heard))
        return card

    async def attach(self, router_id: str) -> AsyncGenerator[Frame, None]:
        frames = Context().run(self._attach.remote, self._replica_id, router_id)
        try:
            async for packed in frames:
                yield unpack(packed)
        except (RayError, RayServeException) as error:
            raise as_serve_error(error, self._replica_id) from error
        finally:
            frames.cancel()

    async def submit(self, router_id: str, requests: Sequence[GenerationRequest]) -> bool:
        timeout_s = PATIENT_TIMEOUT_S if may_take_long(requests) else self._timeout_s
        arguments = (self._replica_id, router_id, tuple(requests))
        is_kept: bool = await self._call(self._submit, *arguments, timeout_s=timeout_s)
        return is_kept

    async def abort(self, router_id: str, request_ids: Sequence[str]) -> None:
        await self._ask("abort", router_id, tuple(request_ids))

    async def pause(self, router_id: str, request_ids: Sequence[str]) -> None:
        await self._ask("pause", router_id, tuple(request_ids))

    async def resume(self, router_id: str, request_ids: Sequence[str]) -> None:
        await self._ask("resume", router_id, tuple(request_ids))

    async def recall(self, response_id: str, owner: str, claim: str) -> tuple[Past, ...]:
        found: tuple[Past, ...] = await self._ask("recall", response_id, owner, claim)
        return found

    async def tokenize(self, request: TokenizeRequest) -> Tokenization:
        found: Tokenization = await self._ask("tokenize", request)
        return found

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        text: str = await self._ask("detokenize", tuple(token_ids))
        return text

    async def stage_adapter(self, name: str, path: str, version: str) -> AdapterCard:
        staged: AdapterCard = await self._ask("stage_adapter", name, path, version, timeout_s=PATIENT_TIMEOUT_S)
        return staged

    async def apply_adapters(self, published: AdapterSet) -> ModelCard:
        card: ModelCard = await self._ask("apply_adapters", published, timeout_s=PATIENT_TIMEOUT_S)
        return card

    async def _ask(self, method: str, *arguments: object, timeout_s: float | None = None) -> Any:
        return await self._call(self._any, self._replica_id, method, *arguments, timeout_s=timeout_s)

    async def _call(self, method: DeploymentHandle[Any], *arguments: object, timeout_s: float | None = None) -> Any:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            return await _called(method, *arguments, timeout_s=limit_s)
        except TimeoutError as error:
            raise ReplicaLost(f"Replica {self._replica_id} did not answer for {limit_s:g} s.") from error
        except (RayError, RayServeException) as error:
            raise as_serve_error(error, self._replica_id) from error


async def _called(method: DeploymentHandle[Any], *arguments: object, timeout_s: float) -> Any:
    """Call in an empty context, as Serve would cancel the call with the client's request.

    Raises the ServeError that is answered, TimeoutError, and what Ray raises.
    """
    response = Context().run(method.remote, *arguments)
    try:
        async with patience(timeout_s):
            answer = await response
    except TimeoutError:
        response.cancel()
        raise
    if isinstance(answer, ServeError):
        raise answer
    return answer


def by_value(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """Return the handle with its results sent over gRPC instead of through Ray's object store.

    That takes a third of the CPU time per message; in Serve's throughput mode it is so anyway.
    """
    return handle.options(_by_reference=False)


def as_serve_error(error: Exception, replica_id: str) -> ServeError:
    """Return what Ray reports as an error of ours."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, ServeError):
        return cause
    if isinstance(error, RayTaskError):
        kind = type(cause).__name__  # no more of it: it may hold what somebody else sent
        return EngineFailed(f"Replica {replica_id} failed ({kind}).")
    if isinstance(error, BackPressureError):
        return Overloaded(f"Replica {replica_id} takes no more calls.", None, {"retry_after_s": 1})
    return ReplicaLost(f"Replica {replica_id} is gone.")


def calls_of(accounts: DeploymentHandle[Any]) -> Callable[..., Awaitable[Any]]:
    """Return what carries a router's calls to Accounts, see `Call` in `router/accounts.py`."""
    handle = by_value(accounts)

    async def call(method: str, *arguments: object, timeout_s: float) -> Any:
        try:
            return await _called(getattr(handle, method), *arguments, timeout_s=timeout_s)
        except (TimeoutError, RayError, RayServeException) as error:
            facts = {"retry_after_s": 2}
            raise Unavailable(f"Accounts do not answer ({type(error).__name__}); retry.", None, facts) from error

    return call


Packed = tuple[str, int, str, tuple[int, ...]] | Delta
"""Request, sample, text and token ids of a delta that has nothing else; any other as it is."""

_LOAD_NAMES = tuple(field.name for field in fields(Load) if field.name != "spent")
_SPENT_NAMES = tuple(field.name for field in fields(Spent))
_load_values = attrgetter(*_LOAD_NAMES)
_spent_values = attrgetter(*_SPENT_NAMES)


def pack(frame: Frame) -> bytes:
    """Return the frame as bytes, which Ray carries as they are. `unpack` gives an equal one."""
    deltas, load = tuple(map(_packed, frame.deltas)), frame.load
    spent = tuple(map(_spent_values, load.spent))
    return pickle.dumps((deltas, _load_values(load), spent, frame.adapters_revision), pickle.HIGHEST_PROTOCOL)


def unpack(packed: bytes) -> Frame:
    """Return the frame that a replica has packed."""
    deltas, values, of_flows, revision = pickle.loads(packed)  # nosec B301 # see there
    spent = tuple(Spent(**dict(zip(_SPENT_NAMES, each, strict=True))) for each in of_flows)
    load = Load(**dict(zip(_LOAD_NAMES, values, strict=True)), spent=spent)
    return Frame(deltas=tuple(map(_unpacked, deltas)), load=load, adapters_revision=revision)


def _packed(delta: Delta) -> Packed:
    return (delta.request_id, delta.sample, delta.text, delta.token_ids) if delta.is_bare else delta


def _unpacked(packed: Packed) -> Delta:
    if isinstance(packed, Delta):
        return packed
    request_id, sample, text, token_ids = packed
    return Delta(request_id=request_id, sample=sample, text=text, token_ids=token_ids)
