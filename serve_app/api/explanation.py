"""The body of POST /v1/explain: what a request would do, as far as it can be known before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import Dialect
from serve_app.api.parameters import Disposition, Renamed
from serve_app.core.bounded import Count
from serve_app.core.names import ModelRef
from serve_app.core.tenants import NANO

Plain = str | int | float | bool | None
NOT_TOLD = frozenset({"model", "prompt", "messages", "images", "tools"})
"""The client has them, and they are long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a prompt leaves of a model's context.

    prompt_tokens:         as it is sent; None where only a replica that computes it would know
    kept_tokens:           of these, where a prompt may be cut
    max_completion_tokens: of each completion; None where the prompt's own number is not known
    reason:                why the model would refuse it; None where it would not
    """

    prompt_tokens: int | None
    kept_tokens: int | None = None
    max_completion_tokens: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedPart:
    """One prompt for one model.

    cost:     in billionths, if nothing is cached and every completion is as long as may be
    defaults: parameters that were not sent and are what the model's folder recommends
    """

    model: ModelRef
    prompt_index: int
    num_completions: int
    max_model_len: int
    room: Room
    cost: int
    defaults: Mapping[str, float]

    def body(self) -> dict[str, object]:
        room = self.room
        return {
            "model": self.model.name,
            "base": self.model.base,
            "adapters": [
                {"name": part.adapter, "version": part.version, "scale": part.scale} for part in self.model.parts
            ],
            "prompt": self.prompt_index,
            "completions": self.num_completions,
            "max_model_len": self.max_model_len,
            "prompt_tokens": room.prompt_tokens,
            "kept_prompt_tokens": room.kept_tokens,
            "max_completion_tokens": room.max_completion_tokens,
            "refused_because": room.reason,
            "default_sampling": dict(self.defaults),
            "cost_at_most": self.cost / NANO,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitState:
    """How one of the tenant's limits per minute stands."""

    limit: Count
    remaining: int
    reset_s: float


def explanation_body(
    request: CompletionRequest,
    sent: Mapping[str, object],
    table: Mapping[str, Disposition],
    parts: Sequence[ExplainedPart],
    *,
    limits: Mapping[str, LimitState],
) -> dict[str, object]:
    """sent: the members of the body;  table: what is done with each, of this kind of body"""
    return {
        "object": "explanation",
        "dialect": request.dialect.name,
        "stream": request.stream,
        "choices": request.num_returned * request.num_parts,
        "ignored_parameters": list(request.ignored_parameters),
        "parameters": parameters_of(request, sent, table, [each.defaults for each in parts]),
        "parts": [each.body() for each in parts],
        "cost_at_most": sum(each.cost for each in parts) / NANO,
        "limits": {name: asdict(each) for name, each in limits.items()},
    }


def parameters_of(
    request: CompletionRequest,
    sent: Mapping[str, object],
    table: Mapping[str, Disposition],
    of_models: Sequence[Mapping[str, float]] = (),
) -> dict[str, object]:
    """Each parameter that is a plain value, and where that is from: the body, the model, the dialect, or everybody's
    default. Where models differ, the value is the first one's.

    of_models: what comes from the model, of each part
    """
    names = {_canonical(name, table) for name, value in sent.items() if value is not None}
    found: dict[str, object] = {}
    for name in sorted(table.keys() & type(request).model_fields.keys() - NOT_TOLD):
        value = getattr(request, name)
        recommended = next((each[name] for each in of_models if name in each), None)
        if recommended is not None:
            found[name] = {"value": recommended, "from": "model"}
            continue
        shown = list(value) if isinstance(value, tuple) else value
        if _is_plain(shown):
            found[name] = {"value": shown, "from": _origin(name, names, request.dialect)}
    return found


def _canonical(name: str, table: Mapping[str, Disposition]) -> str:
    disposition = table.get(name)
    return disposition.to if isinstance(disposition, Renamed) else name


def _origin(name: str, sent: set[str], dialect: Dialect) -> str:
    if name in sent:
        return "body"
    return "dialect" if name in dialect.defaults else "default"


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(each, Plain) for each in value)
    return isinstance(value, Plain)
