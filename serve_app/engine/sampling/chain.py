"""The sampler chain: named stages, applied to candidates in the order that a request gives."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from serve_app.core.request import SamplingParams
from serve_app.engine.sampling import full_stages, mirostat, stages
from serve_app.engine.sampling.candidates import Candidates, Rest
from serve_app.engine.sampling.levels import AnyRow
from serve_app.engine.sampling.moments import Need, holds_too_little, moments
from serve_app.engine.sampling.parameters import Parameters
from serve_app.engine.sampling.scratch import Scratch
from serve_app.engine.sampling.stages import Stage

STAGES: Mapping[str, tuple[Stage, ...]] = MappingProxyType(
    {
        "temperature": (
            Stage(
                stages.divide_by_temperature,
                full_stages.divide_by_temperature,
                lambda p: p.dynamic_temperature_range == 0.0,
                drops=False,
            ),
            Stage(
                stages.divide_by_dynamic_temperature,
                full_stages.divide_by_dynamic_temperature,
                lambda p: p.dynamic_temperature_range > 0.0,
                need=Need.ENTROPY,
                drops=False,
            ),
        ),
        "top_n_sigma": (
            Stage(stages.keep_top_n_sigma, full_stages.keep_top_n_sigma, lambda p: p.top_n_sigma > 0.0, Need.DEVIATION),
        ),
        "top_k": (Stage(stages.keep_top_k, full_stages.keep_top_k, lambda p: p.top_k > 0),),
        "typ_p": (
            Stage(
                stages.keep_typical,
                full_stages.keep_typical,
                lambda p: p.typical_p < 1.0,
                need=Need.ENTROPY,
                share=lambda p: p.typical_p,
            ),
        ),
        "top_p": (
            Stage(
                stages.keep_top_p,
                full_stages.keep_top_p,
                lambda p: p.top_p < 1.0,
                need=Need.TOTAL,
                share=lambda p: p.top_p,
            ),
        ),
        "min_p": (Stage(stages.keep_min_p, full_stages.keep_min_p, lambda p: p.min_p > 0.0),),
        "xtc": (
            Stage(
                stages.exclude_top_choices,
                full_stages.exclude_top_choices,
                lambda p: p.xtc_applies,
                need=Need.TOTAL_AND_COUNT,
            ),
        ),
        "mirostat_1": (
            Stage(mirostat.keep_by_zipf, full_stages.keep_by_zipf, lambda p: torch.isfinite(p.mu), Need.COUNT),
        ),
        "mirostat_2": (
            Stage(mirostat.keep_by_surprise, full_stages.keep_by_surprise, lambda p: torch.isfinite(p.mu), Need.TOTAL),
        ),
    }
)


def order_of(params: SamplingParams) -> tuple[str, ...]:
    """The names of the stages that these parameters run, in their order."""
    if params.mirostat:
        return ("temperature", f"mirostat_{params.mirostat}")
    return tuple(name for name in params.samplers if name in STAGES)


def stages_of(order: Items[str]) -> list[Stage]:
    return [stage for name in order for stage in STAGES[name]]


def run_chain(
    candidates: Candidates, chain: Items[Stage], parameters: Parameters, logits: Tensor, scratch: Scratch
) -> Candidates:
    """Apply the stages one after the other, each to the rows where it is active.

    logits: [rows, vocab] float32, those that the candidates were chosen from
    """
    for stage in chain:
        runs = stage.is_active(parameters) & (candidates.rest != Rest.UNKNOWN)
        if stage.need is not Need.NOTHING:  # sums over a vocabulary with holes: rather take all as candidates
            holes = runs & (candidates.rest == Rest.PIERCED)
            candidates = replace(candidates, rest=torch.where(holes, Rest.UNKNOWN, candidates.rest))
            runs = runs & ~holes
        if stage.share is not None and runs.any():
            hopeless = runs & holds_too_little(candidates, logits, stage.share(parameters))
            candidates = replace(candidates, rest=torch.where(hopeless, Rest.UNKNOWN, candidates.rest))
            runs = runs & ~hopeless
        if runs.any():
            sums = moments(candidates, logits, runs, stage.need, scratch)
            candidates = candidates.merged(runs, stage.apply(candidates, parameters, sums))
    return candidates


def active_stages(chain: Items[Stage], parameters: Parameters) -> list[list[Stage]]:
    """Of each row, those that change it."""
    found: list[list[Stage]] = [[] for _ in parameters.keys]
    for stage in chain:
        for row, is_active in zip(found, stage.is_active(parameters).tolist(), strict=True):
            if is_active:
                row.append(stage)
    return found


def run_full_chain(row: AnyRow, active: Items[Stage], parameters: Parameters) -> None:
    """Apply stages that are active one after the other; the parameters are this row's alone."""
    for stage in active:
        stage.on_full(row, parameters)
        if stage.drops:
            row.narrow()


def can_drop(chain: Items[Stage], parameters: Parameters) -> Tensor:
    """[rows] bool, whether any stage can drop a token of the row."""
    drops = torch.zeros_like(parameters.xtc_applies)
    for stage in chain:
        if stage.drops:
            drops = drops | stage.is_active(parameters)
    return drops
