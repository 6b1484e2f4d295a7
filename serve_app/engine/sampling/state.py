"""What sampling remembers of a sequence between its tokens; it survives preemption, being about tokens alone."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from serve_app.core.request import SamplingParams
from serve_app.engine.sampling.bad_words import BadWords
from serve_app.engine.sampling.counts import TokenCounts
from serve_app.engine.sampling.repeats import Repeats


class SamplingState:
    """Belongs to one sequence. Parts that its parameters leave off are None.

    repetition: tokens that the repetition penalty sees
    occurrence: tokens that the presence and frequency penalties see
    repeats:    what DRY sees
    bias_ids, bias: tokens and what is added to their logits, [n] each
    allowed_ids: the only tokens that are ever drawn, [n]
    biased, allowed: the same ids, to ask for one of them; `allowed` is empty where all are
    bad_words:  what is not to be generated
    mu:         Mirostat's bound on surprise, in bits; twice the target at first
    """

    def __init__(self, params: SamplingParams, prompt_length: int) -> None:
        has_penalties = "penalties" in params.samplers
        self.repetition: TokenCounts | None = None
        self.occurrence: TokenCounts | None = None
        self.repeats: Repeats | None = None
        if has_penalties and params.repetition_penalty != 1.0:
            sees_prompt = params.penalty_window is not None or params.repetition_sees_prompt
            self.repetition = TokenCounts(begin=0 if sees_prompt else prompt_length, window=params.penalty_window)
        if has_penalties and (params.presence_penalty or params.frequency_penalty):
            begin = 0 if params.penalty_window is not None else prompt_length
            self.occurrence = TokenCounts(begin=begin, window=params.penalty_window)
        if params.dry is not None and params.dry.multiplier and "dry" in params.samplers:
            self.repeats = Repeats(params.dry)
        bias = _added_up(params.logit_bias)
        self.biased = frozenset(bias)
        self.bias_ids = torch.tensor(list(bias), dtype=torch.int64)
        self.bias = torch.tensor(list(bias.values()), dtype=torch.float32)
        allowed = params.allowed_token_ids
        self.allowed = frozenset(allowed)
        self.allowed_ids = torch.tensor(allowed, dtype=torch.int64) if allowed else None
        self.bad_words = BadWords(params.bad_words) if params.bad_words else None
        self.mu = 2.0 * params.mirostat_tau

    def catch_up(self, token_ids: Items[int]) -> None:
        """Take the tokens that were appended since the last call; prompt and output."""
        for part in (self.repetition, self.occurrence, self.repeats):
            if part is not None:
                part.catch_up(token_ids)


def _added_up(bias: Items[tuple[int, float]]) -> dict[int, float]:
    """One addend per token."""
    total: dict[int, float] = {}
    for token_id, addend in bias:
        total[token_id] = total.get(token_id, 0.0) + addend
    return total
