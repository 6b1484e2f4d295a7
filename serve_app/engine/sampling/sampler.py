"""Chooses the next token of each row, exactly, and reports raw log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_app.engine.batch import Batch, Span
from serve_app.engine.sampling.draw import uniform
from serve_app.engine.sampling.logprobs import Scored, score
from serve_app.engine.sampling.truncation import Candidates, Truncation, choose_candidates
from serve_app.engine.sequence import Sequence

NUM_CANDIDATES = (256, 4096)  # first try, second try; then the whole vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSpan:
    """What a step gave for one span.

    token_id: the drawn token; None where the span does not sample
    is_finite: False where the model gave no usable logits
    scored:   log-probability of the drawn token, where asked for
    prompt:   of prompt tokens start+1 … start+scores, where asked for
    """

    token_id: int | None = None
    is_finite: bool = True
    scored: Scored | None = None
    prompt: tuple[Scored, ...] = ()


class Sampler:
    """Stateless: every draw is a function of the request's seed and the position."""

    @torch.inference_mode()
    def sample(self, logits: Tensor, batch: Batch) -> list[SampledSpan]:
        """Draw for every span that samples.

        logits: [rows, vocab] float32, rows as `Runner.forward` gives them
        """
        first_rows = _first_rows(batch)
        drawn = self._draw(logits, batch, first_rows)
        results = []
        for span, first in zip(batch.spans, first_rows, strict=True):
            results.append(_report(span, logits[first : first + span.scores + 1], drawn))
        return results

    def _draw(self, logits: Tensor, batch: Batch, first_rows: Items[int]) -> dict[int, int | None]:
        """Token of each sampling sequence by its identity; None where its logits are not finite."""
        spans = [(span, row + span.scores) for span, row in zip(batch.spans, first_rows, strict=True) if span.samples]
        if not spans:
            return {}
        rows = logits[torch.tensor([row for _, row in spans], device=logits.device)]
        sequences = [span.sequence for span, _ in spans]
        is_finite = torch.isfinite(rows.amax(dim=-1)).tolist()
        tokens = torch.argmax(rows, dim=-1).tolist()
        random_rows = [
            index
            for index, sequence in enumerate(sequences)
            if is_finite[index] and not sequence.request.sampling.is_greedy
        ]
        if random_rows:
            chosen = draw_tokens(rows[random_rows], [sequences[index] for index in random_rows])
            for index, token in zip(random_rows, chosen, strict=True):
                tokens[index] = token
        return {id(sequence): tokens[index] if is_finite[index] else None for index, sequence in enumerate(sequences)}


def draw_tokens(logits: Tensor, sequences: Items[Sequence]) -> list[int]:
    """Draw one token per row from its tempered and truncated distribution.

    logits: [rows, vocab] float32, finite where not -inf
    """
    params = [sequence.request.sampling for sequence in sequences]
    device = logits.device
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
    tempered = logits / temperatures[:, None]
    truncation = Truncation(
        top_k=torch.tensor([p.top_k for p in params], device=device),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device),
    )
    uniforms = torch.tensor([_uniform(sequence) for sequence in sequences], dtype=torch.float64, device=device)
    tokens = torch.empty(len(sequences), dtype=torch.int64, device=device)
    truncates = (truncation.top_k > 0) | (truncation.top_p < 1.0) | (truncation.min_p > 0.0)
    everything = torch.nonzero(~truncates)[:, 0]
    if len(everything):
        probabilities = torch.softmax(tempered[everything].double(), dim=-1)
        tokens[everything] = _pick(probabilities, uniforms[everything])
    remaining = torch.nonzero(truncates)[:, 0]
    for num_candidates in (*NUM_CANDIDATES, logits.shape[-1]):
        if not len(remaining):
            break
        found = choose_candidates(tempered[remaining], truncation.of(remaining), num_candidates)
        settled = remaining[found.is_settled]
        if len(settled):
            tokens[settled] = _pick_candidate(found, uniforms[settled])
        remaining = remaining[~found.is_settled]
    return tokens.tolist()


def _uniform(sequence: Sequence) -> float:
    request = sequence.request
    return uniform(
        request.sampling.seed,
        prompt_index=request.prompt_index,
        sample=sequence.sample,
        position=sequence.num_tokens,
    )


def _pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Invert the cumulated weights, [rows, n] float64 and not normalised, at one uniform per row; give columns."""
    cumulated = torch.cumsum(weights, dim=-1)
    thresholds = uniforms * cumulated[:, -1]
    columns = torch.searchsorted(cumulated, thresholds[:, None], right=True)[:, 0]
    last_kept = weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(columns, last_kept)


def _pick_candidate(found: Candidates, uniforms: Tensor) -> Tensor:
    rows = found.is_settled
    columns = _pick(found.probabilities[rows], uniforms)
    return found.token_ids[rows].gather(1, columns[:, None])[:, 0]


def _first_rows(batch: Batch) -> list[int]:
    first_rows, row = [], 0
    for span in batch.spans:
        first_rows.append(row)
        row += span.scores + int(span.samples)
    return first_rows


def _report(span: Span, rows: Tensor, drawn: dict[int, int | None]) -> SampledSpan:
    """Put together what the span's rows say; rows: scored positions first, then the sampled one."""
    sequence = span.sequence
    wanted = sequence.request.logprobs
    prompt: tuple[Scored, ...] = ()
    if span.scores and wanted is not None:
        targets = sequence.token_ids[span.start + 1 : span.start + 1 + span.scores]
        prompt = tuple(score(rows[: span.scores], targets, wanted.top))
    if not span.samples:
        return SampledSpan(prompt=prompt)
    token = drawn[id(sequence)]
    if token is None:
        return SampledSpan(is_finite=False, prompt=prompt)
    scored = None
    if wanted is not None:
        scored = score(rows[span.scores : span.scores + 1], [token], wanted.top)[0]
    return SampledSpan(token_id=token, scored=scored, prompt=prompt)
