"""Turns what a client wants of the computation into the engine's terms, where the model's operator allows it."""

from __future__ import annotations

from serve_app.api.completion import CompletionRequest
from serve_app.api.embeddings import EmbeddingRequest
from serve_app.api.shown import shown
from serve_app.core.cards import ModelCard
from serve_app.core.errors import InvalidRequest, UnsupportedParameter
from serve_app.core.request import RecordParams

STATES, EXPERTS = "return_hidden_states", "return_routed_experts"


def record_wanted(request: CompletionRequest, card: ModelCard) -> RecordParams | None:
    """None where nothing is wanted. Raises UnsupportedParameter for what is not allowed of this model."""
    if isinstance(request, EmbeddingRequest):
        return _embedding(request, card)
    states, experts = request.return_hidden_states, request.return_routed_experts
    if not states and not experts:
        return None
    if states and not card.records.returns_hidden_states:
        raise _not_allowed(STATES, states, card)
    if experts and not card.records.returns_routed_experts:
        raise _not_allowed(EXPERTS, experts, card)
    if not states:
        return RecordParams(experts=True, name=EXPERTS)
    if request.shows_last_state:
        return RecordParams(hidden_states="last", experts=experts, name=STATES)
    is_echoed = request.echo or request.echo_last > 0
    return RecordParams(
        hidden_states="all" if is_echoed else "drawn", echoed=request.echo_last, experts=experts, name=STATES
    )


def _embedding(request: EmbeddingRequest, card: ModelCard) -> RecordParams:
    form = card.records.embedding
    if form is None or form.reason is not None:
        must, remedy = "name a model with embeddings", 'Its operator chooses what they are by "pooling" in its args.'
        found = f"{card.name}, which has none" + (f": {form.reason}" if form is not None else "")
        raise UnsupportedParameter.refusing("model", must=must, found=found, remedy=remedy)
    _check_dimensions(request.dimensions, card)
    return RecordParams(
        hidden_states=form.pooling, name=request.prompt_name, dimensions=request.dimensions, embedding=form
    )


def _check_dimensions(wanted: int | None, card: ModelCard) -> None:
    """Numbers that are left out say something unless the model was trained to have the first say most."""
    allowed = sorted({*card.records.embedding_sizes, card.records.hidden_size} - {0})
    is_free = 0 in card.records.embedding_sizes and (wanted or 0) <= card.records.hidden_size
    if wanted is None or wanted in allowed or is_free:
        return
    must = (
        " or ".join(map(str, allowed))
        if 0 not in card.records.embedding_sizes
        else f"at most {card.records.hidden_size}"
    )
    raise InvalidRequest.refusing(
        "dimensions", must=f"be {must}, as {card.name} was trained for no others", found=str(wanted)
    )


def _not_allowed(name: str, found: object, card: ModelCard) -> UnsupportedParameter:
    return UnsupportedParameter.refusing(
        name,
        must=f"be false, as {card.name} is not configured to return them",
        found=shown(found),
        remedy=f'Its operator allows it with "{name}: true" in its args.',
    )
