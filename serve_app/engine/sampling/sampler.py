"""Chooses the next token of each row, exactly, and reports log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from serve_app.engine.batch import Batch, Span
from serve_app.engine.sampling.drawing import Drawn, draw_tokens
from serve_app.engine.sampling.edits import edit_logits
from serve_app.engine.sampling.logprobs import Scored, score
from serve_app.engine.sampling.mirostat import next_mu
from serve_app.engine.sampling.scratch import Scratch
from serve_app.engine.sequence import Sequence


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
    """Draws as each sequence's parameters say. What it remembers, it keeps in the sequences.

    eos_token_ids: the model's own end tokens, out of play for sequences that must not end yet
    """

    def __init__(self, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._eos_token_ids = eos_token_ids
        self._scratch = Scratch()

    @torch.inference_mode()
    def sample(self, logits: Tensor, batch: Batch) -> list[SampledSpan]:
        """Draw for every span that samples.

        logits: [rows, vocab] float32, rows as `Runner.forward` gives them
        """
        first_rows = _first_rows(batch)
        drawn = self._draw(logits, batch, first_rows)
        results = []
        for span, first in zip(batch.spans, first_rows, strict=True):
            results.append(self._report(span, logits[first : first + span.scores + 1], drawn))
        return results

    def _draw(self, logits: Tensor, batch: Batch, first_rows: Items[int]) -> dict[int, Drawn | None]:
        """Token of each sampling sequence by its identity; None where its logits are not finite."""
        spans = [(span, row + span.scores) for span, row in zip(batch.spans, first_rows, strict=True) if span.samples]
        if not spans:
            return {}
        sequences = [span.sequence for span, _ in spans]
        rows = _take_rows(logits, [row for _, row in spans])
        drawn = self.choose(rows, sequences)
        return {id(sequence): result for sequence, result in zip(sequences, drawn, strict=True)}

    @torch.inference_mode()
    def choose(self, logits: Tensor, sequences: Items[Sequence]) -> list[Drawn | None]:
        """Draw one token per row and carry Mirostat's state on; None where no logit is finite.

        logits: [rows, vocab] float32, never changed
        """
        edited = edit_logits(logits, sequences, self._eos_token_ids)
        places = torch.argmax(edited, dim=-1)  # of what is no number, if anything is
        is_finite = torch.isfinite(edited.gather(1, places[:, None])[:, 0]).tolist()
        likeliest = places.tolist()
        drawn: list[Drawn | None] = [
            _certain(token_id, sequence) if finite else None
            for token_id, finite, sequence in zip(likeliest, is_finite, sequences, strict=True)
        ]
        random_rows = [
            row for row, sequence in enumerate(sequences) if is_finite[row] and not sequence.request.sampling.is_greedy
        ]
        if random_rows:
            drawing = [sequences[row] for row in random_rows]
            chosen = draw_tokens(edited, drawing, random_rows, scratch=self._scratch)
            for row, result in zip(random_rows, chosen, strict=True):
                drawn[row] = result
                _steer(sequences[row], result)
        return drawn

    def _report(self, span: Span, rows: Tensor, drawn: dict[int, Drawn | None]) -> SampledSpan:
        """Put together what the span's rows say; rows: scored positions first, then the sampled one."""
        sequence = span.sequence
        wanted = sequence.request.logprobs
        prompt: tuple[Scored, ...] = ()
        if span.scores and wanted is not None:
            targets = sequence.token_ids[span.start + 1 : span.start + 1 + span.scores]
            prompt = tuple(score(rows[: span.scores], targets, wanted.top, self._scratch))
        if not span.samples:
            return SampledSpan(prompt=prompt)
        token = drawn[id(sequence)]
        if token is None:
            return SampledSpan(is_finite=False, prompt=prompt)
        scored = None
        if wanted is not None and wanted.post_sampling:
            scored = Scored(token.token_id, log(token.probability), token.top)
        elif wanted is not None:
            scored = score(rows[span.scores : span.scores + 1], [token.token_id], wanted.top, self._scratch)[0]
        return SampledSpan(token_id=token.token_id, scored=scored, prompt=prompt)


def _certain(token_id: int, sequence: Sequence) -> Drawn:
    """A greedy choice: a distribution of one token."""
    wanted = sequence.request.logprobs
    return Drawn(token_id, 1.0, ((token_id, 0.0),) if wanted is not None and wanted.top else ())


def _steer(sequence: Sequence, drawn: Drawn) -> None:
    params, state = sequence.request.sampling, sequence.sampling_state
    if params.mirostat:
        state.mu = next_mu(state.mu, drawn.probability, tau=params.mirostat_tau, eta=params.mirostat_eta)


def _take_rows(logits: Tensor, rows: list[int]) -> Tensor:
    """These rows, without a copy where they are all of them in their order."""
    if rows == list(range(logits.shape[0])):
        return logits
    return logits[torch.tensor(rows, device=logits.device)]


def _first_rows(batch: Batch) -> list[int]:
    first_rows, row = [], 0
    for span in batch.spans:
        first_rows.append(row)
        row += span.scores + int(span.samples)
    return first_rows
