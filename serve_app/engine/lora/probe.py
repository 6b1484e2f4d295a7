"""Probes adapters with a few tokens: whether the model's numbers stay finite, change at all, and by the definition."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.engine.decoder.text_part import text_config
from serve_app.engine.lora.adapter import Adapter, LowRank
from serve_app.engine.lora.buckets import shelf_rank
from serve_app.engine.lora.matching import AdapterRefused
from serve_app.engine.lora.modules import BankedLinear
from serve_app.engine.lora.plan import Mix
from serve_app.engine.lora.pool import AdapterBank
from serve_app.engine.tensor_parallel.adapters import PartBank
from serve_app.engine.tensor_parallel.workers import Shard

logger = logging.getLogger(__name__)

NUM_TOKENS = 4
MAX_COLUMNS = 256  # columns of low rank in memory at once, however many adapters there are
MAX_ADAPTERS = 8
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
"""By how much a linear's output may differ from its definition, of the largest number."""


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
    found = {
        version: _fault(adapted[row], is_finite=bool(is_finite[row]), is_inert=torch.equal(adapted[row], plain[row]))
        for row, version in enumerate(slot_of)
    }
    return {version: fault for version, fault in found.items() if fault is not None}


def _fault(adapted: Tensor, *, is_finite: bool, is_inert: bool) -> str | None:
    """adapted: logits [tokens, vocab];  is_finite: of what the adapted modules gave"""
    if not is_finite or not torch.isfinite(adapted).all():
        dtype = str(adapted.dtype).removeprefix("torch.")
        return f"its values are too large: with it, the model's outputs are not finite in {dtype}"
    return "inert: with it, the model's logits are those of the base, bit for bit" if is_inert else None


@torch.inference_mode()
def probe_slot(
    model: nn.Module, bank: AdapterBank, slot: int, weights: Mapping[str, LowRank], *, shard: Shard | None = None
) -> str | None:
    """Run a few tokens through the adapter in a slot, between two steps.

    Each adapted linear has to give W·x + scale·B·A·x, computed in float32 from what was read of the adapter. If it
    changes experts or routers, which are not compared, a forward without it shows whether it changes anything.
    weights: that, in this shard
    shard:   of a divided model; all shards do this together

    Returns the reason to refuse the adapter; None where it may be served.
    """
    found = Comparison()
    with found.watching(bank, weights):
        adapted, is_finite = _forward(model, bank, [((slot, 1.0),)])
    flags = torch.stack([is_finite[0], *(is_finite.new_tensor(each) for each in (not found.wrong, not found.changed))])
    if shard is not None:
        flags = shard.sums.everywhere(flags)
    finite, right, inert = flags.tolist()
    if inert and weights.keys() - bank.wrapped.keys():
        inert = torch.equal(adapted, _forward(model, bank, [()])[0])
    fault = _fault(adapted[0], is_finite=finite, is_inert=inert)
    if fault is None and not right:
        return f"what it changes is not computed as scale·B·A ({', '.join(found.wrong[:3]) or 'in another shard'})"
    return fault


class Comparison:
    """Compares adapted linears with their definition while a forward is computed whose rows all have one adapter.

    wrong: names of linears that give something else;  changed: of those that do not give what the base gives
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.changed: list[str] = []

    @contextmanager
    def watching(self, bank: AdapterBank, weights: Mapping[str, LowRank]) -> Iterator[None]:
        """Within it what the linears give is compared. weights: the adapter's, by the module's name"""
        with ExitStack() as hooks:
            for name, low_rank in weights.items():
                if (linear := bank.wrapped.get(name)) is not None:
                    for handle in self._watch(linear, low_rank):
                        hooks.callback(handle.remove)
            yield

    def _watch(self, linear: BankedLinear, low_rank: LowRank) -> list[Any]:
        kept: list[Tensor] = []

        def keep(_: nn.Module, __: Any, output: Tensor) -> None:
            kept.append(output.clone())  # the change is added in place

        def compare(_: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
            base = kept.pop()
            if not torch.equal(base, output):
                self.changed.append(linear.name)
            change = _change(linear, low_rank, arguments[0], base)
            limit = TOLERANCES[output.dtype] * (base.abs().max() + change.abs().max())
            if (output.float() - base - change).abs().max() > limit:
                self.wrong.append(linear.name)

        return [linear.base.register_forward_hook(keep), linear.register_forward_hook(compare)]


def _change(linear: BankedLinear, low_rank: LowRank, x: Tensor, base: Tensor) -> Tensor:
    """What an adapter adds to a linear's output, by definition, in float32. base: [.., out], what W makes of x"""
    down, up = low_rank.down.to(x.device).float(), low_rank.up.to(x.device).float()
    change = x.float() @ down.T @ up.T
    if low_rank.gain is None:
        return change
    gain = low_rank.gain.to(x.device).float()
    return change * gain + (base if linear.bias is None else base - linear.bias).float() * (gain - 1)


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
