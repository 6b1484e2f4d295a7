"""The sampling parameters of several rows side by side, one tensor per parameter."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from serve_app.engine.decoder.host_copies import sent
from serve_app.engine.sampling.draw import Stream, key, keys_tensor, uniform
from serve_app.engine.scheduler.sequence import Sequence

XTC_HIGHEST_THRESHOLD = 0.5  # above it no two tokens can reach it


@dataclass(frozen=True, slots=True)
class Parameters:
    """[rows] each; the meaning and neutral values of `SamplingParams`.

    xtc_applies: bool, whether this draw is one of those that XTC changes
    mu:          Mirostat's state
    keys:        int64, what decides the draw
    """

    temperature: Tensor
    dynamic_temperature_range: Tensor
    dynamic_temperature_exponent: Tensor
    top_n_sigma: Tensor
    top_k: Tensor
    typical_p: Tensor
    top_p: Tensor
    min_p: Tensor
    min_keep: Tensor
    xtc_threshold: Tensor
    xtc_applies: Tensor
    mu: Tensor
    keys: Tensor

    @classmethod
    def of_sequences(cls, sequences: Items[Sequence], device: torch.device) -> Parameters:
        params = [sequence.request.sampling for sequence in sequences]

        def numbers(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        return cls(
            temperature=numbers([p.temperature for p in params]),
            dynamic_temperature_range=numbers([p.dynamic_temperature_range for p in params]),
            dynamic_temperature_exponent=numbers([p.dynamic_temperature_exponent for p in params]),
            top_n_sigma=numbers([p.top_n_sigma for p in params]),
            top_k=torch.tensor([p.top_k for p in params], device=device),
            typical_p=numbers([p.typical_p for p in params]),
            top_p=numbers([p.top_p for p in params]),
            min_p=numbers([p.min_p for p in params]),
            min_keep=torch.tensor([max(p.min_keep, 1) for p in params], device=device),
            xtc_threshold=numbers([p.xtc_threshold for p in params]),
            xtc_applies=torch.tensor([_xtc_applies(sequence) for sequence in sequences], device=device),
            mu=numbers([sequence.sampling_state.mu for sequence in sequences]),
            keys=keys_tensor([_token_key(sequence) for sequence in sequences], device),
        )

    def of(self, rows: Tensor) -> Parameters:
        return Parameters(*(getattr(self, field.name)[rows] for field in fields(self)))

    def at(self, row: int) -> Parameters:
        """One row's, without a copy."""
        return Parameters(*(getattr(self, field.name)[row : row + 1] for field in fields(self)))

    def sent(self, device: torch.device) -> Parameters:
        """The host's own on the device, in one copy."""
        own = [getattr(self, field.name) for field in fields(self)]
        there = sent(torch.stack([_as_words(each) for each in own]), device)
        return Parameters(*(_of_words(words, each.dtype) for words, each in zip(there, own, strict=True)))


def _as_words(values: Tensor) -> Tensor:
    """Eight bytes each, the bits of floats as they are."""
    return values.view(torch.int64) if values.dtype is torch.float64 else values.long()


def _of_words(words: Tensor, dtype: torch.dtype) -> Tensor:
    return words.view(dtype) if dtype is torch.float64 else words.to(dtype)


def _xtc_applies(sequence: Sequence) -> bool:
    params = sequence.request.sampling
    if params.xtc_probability <= 0.0 or params.xtc_threshold > XTC_HIGHEST_THRESHOLD:
        return False
    return uniform(params.seed, **_place(sequence), stream=Stream.XTC) < params.xtc_probability


def _token_key(sequence: Sequence) -> int:
    params = sequence.request.sampling
    return key(params.seed, **_place(sequence), stream=Stream.MIROSTAT if params.mirostat else Stream.TOKEN)


def _place(sequence: Sequence) -> dict[str, int]:
    """Where in the client's request a draw is made."""
    return {
        "prompt_index": sequence.request.prompt_index,
        "sample": sequence.sample,
        "position": sequence.num_tokens,
    }
