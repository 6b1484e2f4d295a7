"""Decides what is done with a suffix, by request, dialect and models."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects.dialect import Suffix
from serve_app.core.cards import ModelCard
from serve_app.core.errors import InvalidRequest, NotSupported
from serve_app.core.infill import SuffixMode

LACKS = "has no tokens for prefix, suffix and middle"


def with_suffix_mode(request: CompletionRequest, cards: Sequence[ModelCard]) -> CompletionRequest:
    """The request with `suffix_mode` as it is carried out with all these models; as it was where it has no suffix.

    Raises InvalidRequest where a model is asked for what it cannot do, NotSupported where nothing else was asked for.
    """
    lacking = next((card.name for card in cards if not card.fills_gaps), None)
    if request.gap is not None:
        if lacking is not None:
            raise NotSupported(f"{lacking} fills no gaps: its tokenizer {LACKS}.", "model")
        return request.model_copy(update={"suffix_mode": SuffixMode.FIM})
    if not request.suffix:
        return request
    if request.suffix_mode is SuffixMode.FIM and lacking is not None:
        must = f'be "append" or absent with {lacking}, whose tokenizer {LACKS}'
        raise InvalidRequest.refusing("suffix_mode", must=must, found='"fim"')
    is_infill = lacking is None and request.dialect.suffix is Suffix.INFILL
    usual = SuffixMode.FIM if is_infill else SuffixMode.APPEND
    return request.model_copy(update={"suffix_mode": request.suffix_mode or usual})
