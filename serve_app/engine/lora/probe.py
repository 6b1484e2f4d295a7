"""Tries adapters on a few tokens before anybody is served with them: finite, and not without effect."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.engine.decoder.text_part import text_config
from serve_app.engine.lora.adapter import Adapter
from serve_app.engine.lora.bank import AdapterBank
from serve_app.engine.lora.errors import AdapterRefused
from serve_app.engine.lora.plan import Mix
from serve_app.engine.lora.shelf import shelf_rank
from serve_app.engine.tensor_parallel.adapters import PartBank
from serve_app.engine.tensor_parallel.workers import Shard

logger = logging.getLogger(__name__)

NUM_TOKENS = 4
MAX_COLUMNS = 256  # columns of low rank in memory at once, however many adapters there are
MAX_ADAPTERS = 8


def probe(model: nn.Module, adapters: Items[Adapter], *, shard: Shard | None = None) -> dict[str, str]:
    """Run a few tokens through each adapter and without one.

    shard: of a model that is divided; what is not finite in one of them is not

    Returns the reasons of those that are refused, by version. Leaves the model as it was.
    """
    faults: dict[str, str] = {}
    for group in _groups(adapters):
        bank = _bank(model, group, shard)
        try:
            faults |= _probe_group(model, bank, [adapter.version for adapter in group], shard)
        finally:
            bank.unwrap()
    return faults


def _groups(adapters: Items[Adapter]) -> Iterator[list[Adapter]]:
    """As many adapters at a time as a bound of memory allows, one at least."""
    group: list[Adapter] = []
    columns = 0
    for adapter in sorted(adapters, key=lambda adapter: adapter.rank):
        columns += shelf_rank(adapter.rank)
        if group and (columns > MAX_COLUMNS or len(group) == MAX_ADAPTERS):
            yield group
            group, columns = [], shelf_rank(adapter.rank)
        group.append(adapter)
    if group:
        yield group


def _bank(model: nn.Module, group: Items[Adapter], shard: Shard | None) -> AdapterBank:
    if shard is None:
        return AdapterBank(model, group, max_slots=len(group))
    return PartBank(model, group, division=shard.division, max_slots=len(group))


def _probe_group(model: nn.Module, bank: AdapterBank, versions: Items[str], shard: Shard | None) -> dict[str, str]:
    faults: dict[str, str] = {}
    slot_of: dict[str, int] = {}
    for slot, version in enumerate(versions):
        try:
            bank.load(slot, version)
            slot_of[version] = slot
        except AdapterRefused as error:
            faults[version] = str(error)
        except Exception as error:
            logger.exception("adapter version %s could not be read", version)
            faults[version] = f"its files could not be read: {error}"
    if not slot_of:
        return faults
    try:
        return faults | _compare(model, bank, slot_of, shard)
    except Exception as error:
        if len(slot_of) == 1:
            logger.exception("adapter version %s failed its probe", versions[0])
            return faults | dict.fromkeys(slot_of, f"the model cannot be computed with it: {error}")
    for version in slot_of:  # one of them is at fault: each by itself
        faults |= _probe_group(model, bank, [version], shard)
    return faults


@torch.inference_mode()
def _compare(model: nn.Module, bank: AdapterBank, slot_of: dict[str, int], shard: Shard | None) -> dict[str, str]:
    """One row of tokens per adapter, once all with the base and once each with its own."""
    plain, _ = _forward(model, bank, [()] * len(slot_of))
    adapted, is_finite = _forward(model, bank, [((slot, 1.0),) for slot in slot_of.values()])
    if shard is not None:
        is_finite = shard.sums.everywhere(is_finite)
    faults: dict[str, str] = {}
    for row, version in enumerate(slot_of):
        if not is_finite[row] or not torch.isfinite(adapted[row]).all():
            dtype = str(adapted.dtype).removeprefix("torch.")
            faults[version] = f"its values are too large: with it, the model's outputs are not finite in {dtype}"
        elif torch.equal(adapted[row], plain[row]):
            faults[version] = "inert: with it, the model's logits are those of the base, bit for bit"
    return faults


def _forward(model: Any, bank: AdapterBank, mixes: Items[Mix]) -> tuple[Tensor, Tensor]:
    """Logits [rows, tokens, vocab], and for each row whether all that the adapted modules gave is finite.

    So are the squares of their outputs, in float32: a norm would turn larger ones into zeros, which look harmless.
    """
    vocab = int(text_config(model.config).vocab_size)
    parameter = next(model.parameters())
    token_ids = (torch.arange(NUM_TOKENS, device=parameter.device) * 7919 + 11) % vocab
    positions = torch.arange(NUM_TOKENS, device=parameter.device)
    is_finite = torch.ones(len(mixes), dtype=torch.bool, device=parameter.device)

    def watch(_: nn.Module, __: Any, output: Tensor) -> None:
        nonlocal is_finite
        is_finite &= output.float().square().reshape(len(mixes), -1).sum(dim=1).isfinite()

    with _hooks(bank, watch):
        bank.begin_step([mix for mix in mixes for _ in range(NUM_TOKENS)])
        try:
            output = model(
                input_ids=token_ids.expand(len(mixes), -1),
                position_ids=positions.expand(len(mixes), -1),
                use_cache=False,
            )
        finally:
            bank.end_step()
    return output.logits, is_finite


@contextmanager
def _hooks(bank: AdapterBank, watch: Any) -> Iterator[None]:
    handles = [each.register_forward_hook(watch) for each in bank.watched]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
