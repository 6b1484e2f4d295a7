"""Decides what is done with a suffix, by request, dialect and model."""

from __future__ import annotations

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects.dialect import Suffix
from serve_app.core.cards import ModelCard
from serve_app.core.errors import InvalidRequest, NotSupported
from serve_app.core.prompt import SuffixMode

LACKS = "has no tokens for prefix, suffix and middle"


def with_suffix_mode(request: CompletionRequest, card: ModelCard) -> CompletionRequest:
    """The request with `suffix_mode` as it is carried out with this model; as it was where it has no suffix.

    Raises InvalidRequest where the model is asked for what it cannot do, NotSupported where nothing else was asked for.
    """
    if request.gap is not None:
        if not card.fills_gaps:
            raise NotSupported(f"{card.name} fills no gaps: its tokenizer {LACKS}.", "model")
        return request.model_copy(update={"suffix_mode": SuffixMode.FIM})
    if not request.suffix:
        return request
    if request.suffix_mode is SuffixMode.FIM and not card.fills_gaps:
        must = f'be "append" or absent with {card.name}, whose tokenizer {LACKS}'
        raise InvalidRequest.refusing("suffix_mode", must=must, found='"fim"')
    return request.model_copy(update={"suffix_mode": request.suffix_mode or _usual(request, card)})


def _usual(request: CompletionRequest, card: ModelCard) -> SuffixMode:
    is_infill = card.fills_gaps and request.dialect.suffix is Suffix.INFILL
    return SuffixMode.FIM if is_infill else SuffixMode.APPEND
