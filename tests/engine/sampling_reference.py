"""The sampler's definitions written out: one row, the full vocabulary, no shortcuts; and rows to try them on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import cast

from serve_app.core.request import DryParams, LogprobParams, SamplingParams, StopParams
from serve_app.engine.scheduler.sequence import Sequence
from serve_app.text.detokenizer import Detokenizer
from tests.engine.harness import request

NO_TEXT = cast(Detokenizer, None)  # these sequences are sampled, never shown
ROUNDING = 1e-12


def row(
    params: SamplingParams,
    *,
    prompt: Items[int] = (1, 2, 3),
    output: Items[int] = (),
    stop: StopParams | None = None,
    logprobs: LogprobParams | None = None,
    prompt_index: int = 0,
    sample: int = 0,
) -> Sequence:
    """A sequence that has generated `output` so far."""
    asked = request("row", sampling=params, logprobs=logprobs, prompt_index=prompt_index)
    asked = replace(asked, stop=stop or StopParams())
    sequence = Sequence(asked, prompt, sample=sample, max_tokens=100, detokenizer=NO_TEXT)
    sequence.token_ids.extend(output)
    return sequence


def edited(logits: Items[float], prompt: Items[int], output: Items[int], params: SamplingParams) -> list[float]:
    """Bias, then repetition, then frequency and presence, then DRY."""
    result = list(logits)
    for token, addend in params.logit_bias:
        result[token] += addend
    everything = [*prompt, *output]
    if params.penalty_window is None:
        repeated = set(everything if params.repetition_sees_prompt else output)
        occurrences = Counter(output)
    else:
        window = everything[max(0, len(everything) - params.penalty_window) :]
        repeated, occurrences = set(window), Counter(window)
    for token in repeated:
        if result[token] > 0:
            result[token] /= params.repetition_penalty
        else:
            result[token] *= params.repetition_penalty
    for token, count in occurrences.items():
        result[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.dry is not None:
        for token, penalty in dry_penalties(everything, params.dry).items():
            result[token] -= penalty
    return result


def dry_penalties(tokens: Items[int], dry: DryParams) -> dict[int, float]:
    """Walk back from every earlier occurrence of the last token."""
    window = list(tokens if dry.window is None else tokens[max(0, len(tokens) - dry.window) :])
    limit = len(window)
    for end in range(len(window), 0, -1):
        if any(breaker and tuple(window[:end][-len(breaker) :]) == breaker for breaker in dry.breakers):
            limit = len(window) - end
            break
    longest: dict[int, int] = {}
    for place in range(len(window) - 1):
        length = 0
        while length <= place and window[place - length] == window[-1 - length]:
            length += 1
        length = min(length, limit)
        token = window[place + 1]
        if length >= max(1, dry.allowed_length) and (token,) not in dry.breakers:
            longest[token] = max(length, longest.get(token, 0))
    return {token: dry.multiplier * dry.base ** (length - dry.allowed_length) for token, length in longest.items()}


def distribution(
    logits: Items[float], params: SamplingParams, *, mu: float = 0.0, xtc_applies: bool = False
) -> dict[int, float]:
    """Tokens that the chain leaves with their probabilities, by falling probability, ties by rising id."""
    kept = {token: value for token, value in enumerate(logits) if value > -math.inf}
    names = ("temperature", "mirostat") if params.mirostat else params.samplers
    for name in names:
        order = sorted(kept, key=lambda token: (-kept[token], token))
        p = _softmax(kept)
        if name == "temperature":
            temperature = _temperature(p, params)
            kept = {token: value / temperature for token, value in kept.items()}
        elif name == "mirostat":
            kept = _only(kept, _mirostat(order, kept, params.mirostat, mu))
        elif name == "top_n_sigma" and params.top_n_sigma > 0:
            mean = sum(kept.values()) / len(kept)
            sigma = math.sqrt(sum((value - mean) ** 2 for value in kept.values()) / len(kept))
            lowest = kept[order[0]] - params.top_n_sigma * sigma
            kept = {token: value for token, value in kept.items() if value >= lowest}
        elif name == "top_k" and params.top_k > 0:
            kept = _only(kept, order[: params.top_k])
        elif name == "typ_p" and params.typical_p < 1:
            entropy = -sum(p[token] * math.log(p[token]) for token in order if p[token] > 0)
            order.sort(key=lambda token: abs(_surprise(p[token]) - entropy))
            kept = _only(kept, _nucleus(order, p, params.typical_p, params.min_keep))
        elif name == "top_p" and params.top_p < 1:
            kept = _only(kept, _nucleus(order, p, params.top_p, params.min_keep))
        elif name == "min_p" and params.min_p > 0:
            lowest = kept[order[0]] + math.log(params.min_p)
            kept = {
                token: kept[token]
                for place, token in enumerate(order)
                if kept[token] >= lowest or place < params.min_keep
            }
        elif name == "xtc" and xtc_applies and params.xtc_threshold <= 0.5:
            above = [token for token in order if p[token] >= params.xtc_threshold]
            if len(above) > 1 and len(order) - len(above) + 1 >= params.min_keep:
                kept = _only(kept, order[len(above) - 1 :])
    p = _softmax(kept)
    return {token: p[token] for token in sorted(kept, key=lambda token: (-kept[token], token))}


def _temperature(p: dict[int, float], params: SamplingParams) -> float:
    spread = params.dynamic_temperature_range
    if spread == 0:
        return params.temperature
    if len(p) == 1:
        return 1.0
    entropy = -sum(value * math.log(value) for value in p.values() if value > 0)
    low, high = max(0.0, params.temperature - spread), params.temperature + spread
    relative = min(1.0, max(0.0, entropy / math.log(len(p))))
    return max(1e-6, low + (high - low) * relative**params.dynamic_temperature_exponent)


def _mirostat(order: list[int], logits: dict[int, float], version: int, mu: float) -> list[int]:
    if version == 2:
        p = _softmax(logits)
        return [token for place, token in enumerate(order) if place == 0 or _surprise(p[token]) / math.log(2) <= mu]
    pairs = range(min(100, len(order)) - 1)
    if not pairs:
        return order[:1]
    t = [math.log((i + 2) / (i + 1)) for i in pairs]
    b = [logits[order[i]] - logits[order[i + 1]] for i in pairs]  # the ln of p_i / p_{i+1}
    s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
    eps = s - 1
    base = (eps * 2**mu) / (1 - len(order) ** -eps)
    if math.log(base) / s > math.log(len(order)) + 1:
        return order  # the power would be more than there are, and may be more than a float holds
    return order[: max(1, int(base ** (1 / s)))]


def _nucleus(order: list[int], p: dict[int, float], bound: float, min_keep: int) -> list[int]:
    kept: list[int] = []
    mass = 0.0
    for token in order:
        if mass >= bound - ROUNDING and len(kept) >= max(1, min_keep):
            break
        kept.append(token)
        mass += p[token]
    return kept


def _softmax(logits: dict[int, float]) -> dict[int, float]:
    highest = max(logits.values())
    weights = {token: math.exp(value - highest) for token, value in logits.items()}
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def _surprise(probability: float) -> float:
    return -math.log(probability) if probability > 0 else math.inf


def _only(logits: dict[int, float], tokens: Items[int]) -> dict[int, float]:
    return {token: logits[token] for token in tokens}
