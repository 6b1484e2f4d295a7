"""Binds the adapters that are found on disk, and tries each with a few tokens before it is served."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from serve_app.core.cards import AdapterCard, AdapterRecord
from serve_app.engine.decoder.config_check import check_config, choose_dtype, shapes_of
from serve_app.engine.decoder.text_part import text_config
from serve_app.engine.lora.adapter import Adapter, LowRank, bind_adapter, read_weights, too_large
from serve_app.engine.lora.matching import AdapterRefused, Matcher, head_name
from serve_app.engine.lora.modules import BankedLinear
from serve_app.engine.lora.plan import Mix
from serve_app.engine.lora.pool import AdapterBank
from serve_app.engine.tensor_parallel.workers import Bind, Shard
from serve_app.engine.vision.support import VisionSupport

logger = logging.getLogger(__name__)


def bind_adapters(
    found: Items[AdapterRecord],
    module: PreTrainedModel,
    *,
    shard: Shard | None = None,
    matcher: Matcher | None = None,
) -> tuple[list[Adapter], tuple[AdapterCard, ...]]:
    """Bind every adapter that fits and passes its probe; give all cards, those that do not with the reason.

    shard:   of a model that is divided; all shards do this together
    matcher: None makes one
    """
    if shard is not None and shard.workers is not None:
        shard.workers.tell(Bind(records=tuple(found)))
    matcher = matcher or (Matcher.of(module) if found else None)
    bound, refused = _bind(found, matcher, is_divided=shard is not None)
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
    matcher = Matcher.of(shapes, sees=isinstance(judged.vision, VisionSupport)) if found else None
    bound, refused = _bind(found, matcher, is_divided=tensor_parallel > 1)
    for name, adapter in bound.items():
        try:
            read_weights(adapter, shapes, None, dtype=numbers)
        except AdapterRefused as error:
            refused[name] = str(error)
    return {**bound, **refused}


def _bind(
    found: Items[AdapterRecord], matcher: Matcher | None, *, is_divided: bool
) -> tuple[dict[str, Adapter], dict[str, str]]:
    """Those that fit, and the reasons of the others, by name."""
    bound: dict[str, Adapter] = {}
    refused: dict[str, str] = {}
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
    others = {name for name in modules if _place(name, last) not in BEHIND_KEYS}
    return len(others) < 2 and others <= {head_name(model)}


def _place(name: str, last: str) -> str:
    """A module's name within the last layer; "" outside of it."""
    before, sign, within = name.rpartition(f".{last}")
    return within if sign and "layers." not in before else ""


NUM_TOKENS = 4
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
"""By how much a linear's output may differ from its definition, of the largest number."""


def probe(model: nn.Module, adapters: Items[Adapter], *, shard: Shard | None = None) -> dict[str, str]:
    """Try each adapter by itself, as `probe_slot` does; none is in a slot yet.

    shard: of a model that is divided; all shards do this together

    Returns the reasons of those that are refused, by version. Leaves the model as it was.
    """
    faults = {adapter.version: _probe_alone(model, adapter, shard) for adapter in adapters}
    return {version: fault for version, fault in faults.items() if fault is not None}


def _probe_alone(model: nn.Module, adapter: Adapter, shard: Shard | None) -> str | None:
    bank = AdapterBank(model, [adapter], max_slots=1, division=None if shard is None else shard.division)
    try:
        try:
            weights = bank.read(adapter)
        except AdapterRefused:
            raise
        except Exception as error:
            return f"its files could not be read: {error}"
        bank.offer(adapter.version, weights)
        bank.load(0, adapter.version)
        return probe_slot(model, bank, 0, bank.own_part(weights), shard=shard)
    except AdapterRefused as error:
        return str(error)
    except Exception as error:
        logger.exception("adapter version %s failed its probe", adapter.version)
        return f"the model cannot be computed with it: {error}"
    finally:
        bank.unwrap()


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
        adapted, is_finite = _forward(model, bank, ((slot, 1.0),))
    flags = torch.stack([is_finite, *(is_finite.new_tensor(each) for each in (not found.wrong, not found.changed))])
    if shard is not None:
        flags = shard.sums.everywhere(flags)
    finite, right, inert = flags.tolist()
    if inert and weights.keys() - bank.wrapped.keys():
        inert = torch.equal(adapted, _forward(model, bank, ())[0])
    fault = _fault(adapted, is_finite=finite, is_inert=inert)
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
    return change + (base if linear.bias is None else base - linear.bias).float() * (gain - 1)


def _fault(adapted: Tensor, *, is_finite: bool, is_inert: bool) -> str | None:
    """adapted: logits [tokens, vocab];  is_finite: of what the adapted modules gave"""
    if not is_finite or not torch.isfinite(adapted).all():
        return too_large(adapted.dtype)
    return "inert: with it, the model's logits are those of the base, bit for bit" if is_inert else None


def _forward(model: Any, bank: AdapterBank, mix: Mix) -> tuple[Tensor, Tensor]:
    """Logits [tokens, vocab], and whether all that the adapted modules gave is finite, [] bool.

    So are the squares of their outputs, in float32: a norm would turn larger ones into zeros, which look harmless.
    """
    vocab = int(text_config(model.config).vocab_size)
    device = next(model.parameters()).device
    token_ids = (torch.arange(NUM_TOKENS, device=device) * 7919 + 11) % vocab
    positions = torch.arange(NUM_TOKENS, device=device)
    is_finite = torch.ones((), dtype=torch.bool, device=device)

    def watch(_: nn.Module, __: Any, output: Tensor) -> None:
        nonlocal is_finite
        is_finite = is_finite & output.float().square().sum().isfinite()

    with ExitStack() as hooks:
        for each in bank.watched:
            hooks.callback(each.register_forward_hook(watch).remove)
        bank.begin_step([mix] * NUM_TOKENS)
        hooks.callback(bank.end_step)
        output = model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
    return output.logits[0], is_finite
