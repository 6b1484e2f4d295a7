"""Edits logits before a draw, as sparse lists. The cost is in the tokens concerned, not in the vocabulary.

The order is llama.cpp's: bias, repetition, frequency and presence, DRY, then bans. What is not among the tokens that a
row allows is out of play last, whatever its logit came to.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from collections.abc import Set
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from serve_app.engine.decoder.memory import sent
from serve_app.engine.scheduler.sequence import Sequence


@dataclass(slots=True)
class SparseValues:
    """One value for some of the logits [rows, vocab], each named at most once by its flat place."""

    vocab: int
    places: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def put(self, row: int, token_ids: Tensor, values: Tensor) -> None:
        if len(token_ids):
            self.places.append(token_ids + row * self.vocab)
            self.values.append(values)

    def put_known(self, row: int, token_ids: Tensor, values: Tensor) -> None:
        """Put values, but for ids that are no tokens of the model: they would be another row's."""
        is_known = (token_ids >= 0) & (token_ids < self.vocab)
        self.put(row, token_ids[is_known], values[is_known])

    def joined(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return places and values, [n] each."""
        return sent(torch.cat(self.places), device), sent(torch.cat(self.values), device)


def edit_logits(logits: Tensor, sequences: Items[Sequence], eos_token_ids: frozenset[int]) -> Tensor:
    """Apply what each sequence's parameters ask for; the state of each is brought up to its last token.

    logits: [rows, vocab] float32, never changed

    Returns the same tensor where no row asks for anything, else an edited copy.
    """
    vocab = logits.shape[-1]
    bias, scale, minus, dry, ban = (SparseValues(vocab) for _ in range(5))
    for row, sequence in enumerate(sequences):
        params, state = sequence.request.sampling, sequence.sampling_state
        state.catch_up(sequence.token_ids)
        if len(state.bias_ids):
            bias.put_known(row, state.bias_ids, state.bias)
        if (seen := state.repetition) is not None:
            scale.put(row, seen.token_ids, torch.full((len(seen),), params.repetition_penalty))
        if (seen := state.occurrence) is not None:
            minus.put(row, seen.token_ids, -(params.frequency_penalty * seen.counts + params.presence_penalty))
        if state.repeats is not None:
            token_ids, penalties = state.repeats.penalties()
            dry.put(row, token_ids, -penalties.float())
        if banned := _banned(sequence, eos_token_ids):
            ban.put_known(row, torch.tensor(list(banned)), torch.full((len(banned),), -inf))
    is_narrowed = any(sequence.sampling_state.allowed_ids is not None for sequence in sequences)
    if not is_narrowed and not any(part.places for part in (bias, scale, minus, dry, ban)):
        return logits
    edited = logits.clone()
    _add(edited, bias)
    _scale(edited, scale)
    for part in (minus, dry, ban):
        _add(edited, part)
    _narrow(edited, sequences)
    return edited


def _narrow(edited: Tensor, sequences: Items[Sequence]) -> None:
    """Take all that is not allowed out of play."""
    for row, sequence in enumerate(sequences):
        if (allowed_ids := sequence.sampling_state.allowed_ids) is not None:
            places = sent(allowed_ids, edited.device)
            kept = edited[row, places]
            edited[row] = -inf
            edited[row, places] = kept


def _banned(sequence: Sequence, eos_token_ids: frozenset[int]) -> Set[int]:
    """Return tokens that would complete a bad word, or end the sequence too early."""
    bad_words = sequence.sampling_state.bad_words
    too_early = _too_early(sequence, eos_token_ids)
    if bad_words is None:
        return too_early
    return too_early | bad_words.completions(sequence.token_ids, num_generated=sequence.num_generated)


def _too_early(sequence: Sequence, eos_token_ids: frozenset[int]) -> Set[int]:
    """Return the tokens that would end the sequence before its least number of tokens.

    If a constrained text ignores end tokens, all of them are returned: nothing of the constraint follows an end.
    """
    stop = sequence.request.stop
    if sequence.matcher is not None and stop.ignore_eos:
        return eos_token_ids.union(stop.token_ids if sequence.num_generated < stop.min_tokens else ())
    if sequence.num_generated >= stop.min_tokens:
        return frozenset()
    return set(stop.token_ids) if stop.ignore_eos else eos_token_ids.union(stop.token_ids)


def _add(logits: Tensor, part: SparseValues) -> None:
    if part.places:
        places, values = part.joined(logits.device)
        logits.view(-1)[places] += values


def _scale(logits: Tensor, part: SparseValues) -> None:
    """Apply the repetition penalty (Keskar et al., "CTRL", 2019, in the form that also lowers negative logits)."""
    if part.places:
        places, values = part.joined(logits.device)
        before = logits.view(-1)[places]
        logits.view(-1)[places] = torch.where(before > 0, before / values, before * values)
