"""Capsules: what it takes to ask for a completion again, and to compare what comes with what came."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain

from serve_app.core.cards import ModelCard
from serve_app.core.names import ModelRef
from serve_app.core.progress import Past
from serve_app.router.resuming import Found

NOT_REPEATED = frozenset({"stream", "stream_options", "request_id"})
"""Members of a body that say how it is answered, and under which name."""
NAMING_ADAPTERS = ("lora_path", "lora", "adapter")
"""Members that name adapters beside the model. What is asked by them is not pinned: a replay says what it got."""


def capsule_body(
    found: Found, sent: Mapping[str, object], cards: Mapping[str, ModelCard], *, service_version: str
) -> dict[str, object]:
    """Return the capsule of a stream or answer that replicas keep, so far as it was told.

    sent: the members of the body as they came;  cards: of the base models that are served
    """
    kept, plain = found.kept, dict[int, object]()
    request = {name: value for name, value in sent.items() if name not in NOT_REPEATED}
    return {
        "object": "capsule",
        "id": kept.id,
        "created": kept.created,
        "service_version": service_version,
        "path": kept.path,
        "dialect": kept.dialect,
        "request": request | pinned(sent, kept.models) | {"seed": kept.seed},
        "parts": [_part(number, past, cards, plain) for number, past in sorted(found.parts.items())],
    }


def pinned(sent: Mapping[str, object], models: Sequence[ModelRef]) -> dict[str, object]:
    """Return the member `model` with the versions that answered; nothing where other members name adapters, too.

    models: of the parts, those of the first model that was asked first
    """
    if any(sent.get(name) for name in NAMING_ADAPTERS):
        return {}
    if not isinstance(listed := sent.get("model"), list):
        return {"model": models[0].pinned}
    return {"model": [each.pinned for each in models[:: len(models) // len(listed)]]}


def _part(number: int, past: Past, cards: Mapping[str, ModelCard], plain: dict[int, object]) -> dict[str, object]:
    """plain: parameters as JSON has them, by their identity: those of all parts may be one object, and large"""
    request = past.request
    for each in (request.sampling, request.stop):
        if id(each) not in plain:
            plain[id(each)] = _plain(asdict(each))
    card = cards.get(request.model.base)
    return {
        "part": number,
        "model": request.model.pinned,
        "engine": None if card is None else card.engine,
        "numerics": past.numerics,
        "prompt_tokens": next((each.prompt.num_tokens for each in past.deltas if each.prompt is not None), None),
        "sampling": plain[id(request.sampling)],
        "stop": plain[id(request.stop)],
        "choices": [_choice(past, sample) for sample in range(request.n)],
    }


def _choice(past: Past, sample: int) -> dict[str, object]:
    told = [each for each in past.deltas if each.sample == sample]
    finish = next((each.finish for each in told if each.finish is not None), None)
    return {
        "token_ids": list(chain.from_iterable(each.token_ids for each in told)),
        "text": "".join([each.text for each in told]),
        "finish_reason": None if finish is None else finish.reason.value,
        "matched_stop": None if finish is None else finish.matched_stop,
    }


def _plain(value: object) -> object:
    """Return the value as JSON has it: infinity, which bans a token, is a text there."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
