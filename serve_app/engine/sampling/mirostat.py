"""Mirostat 1 and 2: truncation that is steered so that the surprise of drawn tokens stays near a target.

Basu et al., "Mirostat: a neural text decoding algorithm that directly controls perplexity", ICLR 2021; the forms of
llama.cpp, surprise in bits.
"""

from __future__ import annotations

from dataclasses import replace
from math import log, log2

import torch
from torch import Tensor

from serve_app.engine.sampling.candidates import Candidates, Rest
from serve_app.engine.sampling.moments import Moments
from serve_app.engine.sampling.parameters import Parameters
from serve_app.engine.sampling.stages import keep_first, keep_from

NUM_ESTIMATED = 100  # so many likeliest tokens give the estimate of the distribution's shape


def keep_by_zipf(candidates: Candidates, parameters: Parameters, moments: Moments) -> Candidates:
    """Version 1: estimate the exponent of Zipf's law and keep as many tokens as give the wanted surprise."""
    vocab = moments.count
    exponent = zipf_exponent(candidates.logits[:, :NUM_ESTIMATED], candidates.kept[:, :NUM_ESTIMATED])
    counts = torch.minimum(zipf_count(exponent, parameters.mu, vocab), vocab)
    result = keep_first(candidates, counts)
    needed = torch.minimum(vocab, torch.full_like(vocab, NUM_ESTIMATED))
    is_known = (candidates.rest == Rest.GONE) | (candidates.num_kept >= needed)
    rest = torch.where(counts >= vocab, candidates.rest, result.rest)
    return replace(result, rest=torch.where(is_known, rest, Rest.UNKNOWN))


def keep_by_surprise(candidates: Candidates, parameters: Parameters, moments: Moments) -> Candidates:
    """Version 2: keep the tokens whose surprise is at most mu bits."""
    return keep_from(candidates, moments.log_total - parameters.mu * log(2.0))


def zipf_exponent(logits: Tensor, kept: Tensor) -> Tensor:
    """Least-squares fit of ln(p_i / p_{i+1}) = s * ln((i+2) / (i+1)); [rows], nan where there is one token.

    logits: [rows, n] float64, the highest ones by falling value; kept: [rows, n] bool, whether in play
    """
    is_pair = kept[:, 1:]
    ranks = torch.arange(1, logits.shape[-1], dtype=torch.float64, device=logits.device)
    steps = torch.log((ranks + 1) / ranks).expand_as(is_pair)
    falls = (logits[:, :-1] - logits[:, 1:]).masked_fill(~is_pair, 0.0)
    products = torch.cat((torch.zeros_like(logits[:, :1]), steps * falls), dim=-1)
    squares = torch.cat((torch.zeros_like(logits[:, :1]), (steps**2).masked_fill(~is_pair, 0.0)), dim=-1)
    return torch.cumsum(products, dim=-1)[:, -1] / torch.cumsum(squares, dim=-1)[:, -1]


def zipf_count(exponent: Tensor, mu: Tensor, vocab: Tensor) -> Tensor:
    """((eps 2^mu) / (1 - N^-eps)) ^ (1/s) with eps = s - 1, in its limit where eps is 0; at least 1, whole; [rows]"""
    excess = exponent - 1.0
    shrink = torch.where(excess.abs() < 1e-9, 1.0 / torch.log(vocab), excess / (1.0 - vocab**-excess))
    counts = (shrink * 2.0**mu) ** (1.0 / exponent)
    return torch.nan_to_num(counts, nan=1.0, posinf=2.0**53).floor().clamp(1.0, 2.0**53)


def next_mu(mu: float, probability: float, *, tau: float, eta: float) -> float:
    """Move mu against the error of the last token's surprise; probability is among the tokens kept."""
    return mu - eta * (-log2(probability) - tau)
