"""Registers the adapters found on disk: binds each to the model, then tries it. Checks use the same code."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from serve_app.core.cards import AdapterCard, AdapterRecord
from serve_app.engine.decoder.config_check import check_config, choose_dtype, shapes_of
from serve_app.engine.decoder.text_part import text_config
from serve_app.engine.lora.adapter import Adapter, bind_adapter, read_weights
from serve_app.engine.lora.buckets import shelf_rank
from serve_app.engine.lora.matching import AdapterRefused, Matcher, head_name
from serve_app.engine.lora.plan import Mix
from serve_app.engine.lora.pool import AdapterBank
from serve_app.engine.tensor_parallel.adapters import PartBank
from serve_app.engine.tensor_parallel.workers import Bind, Shard
from serve_app.engine.vision.support import VisionSupport

logger = logging.getLogger(__name__)


def bind_adapters(
    found: Items[AdapterRecord], module: PreTrainedModel, *, shard: Shard | None = None, sees: bool = False
) -> tuple[list[Adapter], tuple[AdapterCard, ...]]:
    """Bind every adapter that fits and passes its probe; give all cards, those that do not with the reason.

    shard: of a model that is divided; all shards do this together
    sees:  whether images are served
    """
    if shard is not None and shard.workers is not None:
        shard.workers.tell(Bind(records=tuple(found)))
    bound, refused = _bind(found, module, is_divided=shard is not None, sees=sees)
    versions = {adapter.version: adapter for adapter in bound.values()}
    faults = probe(module, list(versions.values()), shard=shard)
    cards = []
    for record in found:
        reason = refused.get(record.name) or faults.get(record.version)
        if reason is not None:
            logger.warning("adapter %s is refused: %s", record.name, reason)
            cards.append(replace(record.card(), reason=reason))
            continue
        adapter = bound[record.name]
        for note in adapter.notes:
            logger.warning("adapter %s: %s", record.name, note)
        cards.append(replace(record.card(), rank=adapter.rank, keeps_prefix=keeps_prefix(adapter.changes, module)))
    return [adapter for version, adapter in versions.items() if version not in faults], tuple(cards)


def judge_adapters(
    found: Items[AdapterRecord], path: Path, *, dtype: str, images: bool, tensor_parallel: int
) -> dict[str, Adapter | str]:
    """Say of each adapter, by its name, what it is bound to or why it is refused; all but what a probe would find.

    path: of the model, whose weights are not read; the rest is as in its configuration

    Raises ModelNotSupported.
    """
    judged = check_config(path, with_images=images)
    shapes: Any = shapes_of(judged)
    numbers = choose_dtype(dtype, judged.dtype, torch.device("cpu"))
    bound, refused = _bind(found, shapes, is_divided=tensor_parallel > 1, sees=isinstance(judged.vision, VisionSupport))
    for name, adapter in bound.items():
        try:
            read_weights(adapter, shapes, None, dtype=numbers)
        except AdapterRefused as error:
            refused[name] = str(error)
    return {**bound, **refused}


def _bind(
    found: Items[AdapterRecord], module: PreTrainedModel, *, is_divided: bool, sees: bool
) -> tuple[dict[str, Adapter], dict[str, str]]:
    """Those that fit, and the reasons of the others, by name."""
    bound: dict[str, Adapter] = {}
    refused: dict[str, str] = {}
    matcher = Matcher.of(module, sees=sees) if found else None
    for record in found:
        try:
            assert matcher is not None, "there is something to match"
            bound[record.name] = bind_adapter(record, matcher, is_divided=is_divided)
        except AdapterRefused as error:
            refused[record.name] = str(error)
        except Exception as error:  # whatever is wrong with one adapter's files, the model is served
            logger.exception("adapter %s could not be read", record.name)
            refused[record.name] = f"its files could not be read: {error}"
    return bound, refused


BEHIND_KEYS = frozenset(
    {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate_up_proj"}
)
"""Of a layer, what makes neither keys nor values, nor what they are made from."""


def keeps_prefix(modules: Iterable[str], model: nn.Module) -> bool:
    """Whether changes to these modules change no key and no value of any token.

    Keys and values of a layer follow from all layers before it, so only the head may be changed, and of the last layer
    what makes queries or comes behind attention. Few adapters are like that; where it is not known, it is False.
    """
    config: Any = text_config(model.config)
    last = f"layers.{int(getattr(config, 'num_hidden_layers', 0)) - 1}."
    head = head_name(model)
    return all(name == head or _place(name, last) in BEHIND_KEYS for name in modules)


def _place(name: str, last: str) -> str:
    """A module's name within the last layer; "" outside of it."""
    before, sign, within = name.rpartition(f".{last}")
    return within if sign and "layers." not in before else ""


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
