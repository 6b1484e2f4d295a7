"""Checks at load that a model can be computed in packed batches: steps must give its own logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from serve_app.engine.decoder.layout import lay_out
from serve_app.engine.decoder.loop import NotDescribed, Scorings, build_loop, norm_offset_of
from serve_app.engine.decoder.quantized_linear import QuantisedLinear
from serve_app.engine.decoder.record import expert_layers
from serve_app.engine.decoder.step import CurrentStep, PackedAttention, Step, Unfit
from serve_app.engine.decoder.stored import giving_zeros
from serve_app.engine.decoder.text_part import ModelNotSupported, take_over_scales, text_config
from serve_app.engine.decoder.transformers_private import lets_attention_be_chosen
from serve_app.engine.kv.pages import PageStorage
from serve_app.engine.kv.storage import Holding, KeyValueShape, LayerShape, Reading
from serve_app.engine.tensor_parallel.workers import Collectives
from serve_app.kernels.forms import Scoring
from serve_app.kernels.interface import Kernels

logger = logging.getLogger(__name__)

Arguments = tuple[Any, ...]


class Routes:
    """Which experts every layer of a model chose for a run of tokens, and their weights.

    A choice between two that are nearly alike is a matter of rounding, and either is right; what follows from it is as
    far from the other as two different models are. Nothing for a dense model, or one whose experts are not known.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = expert_layers(module)
        self._chosen: dict[int, tuple[Tensor, Tensor]] = {}

    def noting(self) -> AbstractContextManager[None]:
        """Return a context in which all tokens are computed once, and their routes noted."""
        return self._hooked(self._note)

    def following(self, start: int, length: int) -> AbstractContextManager[None]:
        """Return a context in which `length` of these tokens, from `start` on, are computed by the noted routes."""
        return self._hooked(partial(self._follow, start, length))

    def _note(self, layer: int, _: nn.Module, arguments: Arguments) -> None:
        self._chosen[layer] = (arguments[1], arguments[2])

    def _follow(self, start: int, length: int, layer: int, _: nn.Module, arguments: Arguments) -> Arguments:
        noted = (each.narrow(-2, start, length) for each in self._chosen[layer])
        return (arguments[0], *noted, *arguments[3:])

    @contextmanager
    def _hooked(self, hook: Callable[..., Arguments | None]) -> Iterator[None]:
        with ExitStack() as hooks:
            for layer, part in self._layers.items():
                hooks.callback(part.register_forward_pre_hook(partial(hook, layer)).remove)
            yield


CHUNKS = (13, 9, 1, 1)
"""Tokens of each probed step: two chunks, then single ones."""
FEW_CHUNKS = (13, 11)
"""Tokens of each step for modules that compute beside a loop; the loop is tried with the others."""
BLOCK_SIZE = 4
OTHER_WAY = "its attention does not go through AttentionInterface"

# of the largest logit, by which logits may differ
EXACT = 1e-3
IN_16_BITS = 0.05
ROUNDED = 0.1
"""Where inputs are rounded to eight bits. With 24 layers and 152k tokens (random weights, Qwen2.5-0.5B's shape) they
differed by up to 0.07 in float32 and 0.06 in bfloat16, without rounding by 0.02 in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceForward:
    """What a model computed of a few tokens by itself: in one piece, by its own attention.

    logits:    [tokens, vocab] float32
    shape:     of keys and values
    scorings:  how each layer weighs keys, by its number
    rounds:    whether linears round their inputs, where a sum of another order may be rounded to the next number
    """

    token_ids: Tensor
    logits: Tensor
    routes: Routes
    shape: KeyValueShape
    scorings: Mapping[int, Scoring]
    rounds: bool


@torch.inference_mode()
def run_reference(module: PreTrainedModel) -> ReferenceForward:
    """Have the model compute a few tokens by itself: in one piece, by its own attention.

    Leaves the model with that, its queries to be scaled by the engine. Raises ModelNotSupported.
    """
    config = text_config(module.config)
    length = min(sum(CHUNKS), int(config.max_position_embeddings))
    token_ids = (torch.arange(length, device=module.device) * 7919 + 11) % int(config.vocab_size)
    routes = Routes(module)
    with _refusing(module):
        with routes.noting():
            own = _compute(module, token_ids, torch.arange(length, device=module.device)).float()
        take_over_scales(module)
        recorder = _record(module, token_ids[:2])
        shape = recorder.shape()
    rounds = any(isinstance(each, QuantisedLinear) for each in module.modules())
    return ReferenceForward(
        token_ids=token_ids, logits=own, routes=routes, shape=shape, scorings=recorder.scorings, rounds=rounds
    )


@torch.inference_mode()
def outlined_shape(module: PreTrainedModel) -> KeyValueShape | None:
    """Return the shape of keys and values of a model without numbers; None if its path depends on numbers.

    Raises ModelNotSupported where `run_reference` would, for what layers hand attention.
    """
    for each in module.modules():
        if isinstance(each, PreTrainedModel):
            each.warn_if_padding_and_no_attention_mask = lambda *_: None  # it looks at the tokens' numbers
    try:
        return _record(module, torch.arange(2, device="meta")).shape()
    except Unfit as error:
        raise ModelNotSupported(f"{module.config.model_type}: {error}") from error
    except Exception:  # what has no numbers fails in many ways, none of which is the model's fault
        if not lets_attention_be_chosen(module):
            raise ModelNotSupported(f"{module.config.model_type}: {OTHER_WAY}") from None
        return None


@torch.inference_mode()
def check(
    module: PreTrainedModel,
    reference: ReferenceForward,
    *,
    kernels: Kernels = "torch",
    chunks: Sequence[int] = CHUNKS,
) -> None:
    """Compute the same tokens in steps by the engine's attention, and compare the logits. Raises ModelNotSupported.

    The steps take the experts that the one piece took: in 16 bits a router that is nearly undecided chooses otherwise
    than before, whoever computes what it reads. What attention gives reaches the logits beside the experts as well.

    kernels: who computes attention over pages
    chunks:  tokens of each step
    """
    with _refusing(module):
        current = CurrentStep()
        storage = storage_for(module, reference, kernels=kernels)
        attention = PackedAttention(current, reference.shape)

        def compute(step: Step, start: int) -> Tensor:
            with current.running(step), reference.routes.following(start, len(step.token_ids)):
                return _compute(module, step.token_ids, step.positions, logits_to_keep=step.logit_rows)

        try:
            module.set_attn_implementation(attention.name)
            ours = compute_in_steps(reference, storage, compute, chunks=chunks)
        finally:
            attention.close()
    difference, limit = distance(reference, ours, module.dtype)
    if not difference <= limit:
        raise ModelNotSupported(
            f"{module.config.model_type}: logits through the engine's attention are off by {difference:.2g}"
            f" (allowed: {limit:.2g})"
        )


def distance(reference: ReferenceForward, logits: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return by how much logits differ from the model's own, and by how much they may in this dtype."""
    if reference.rounds:
        tolerance = ROUNDED
    else:
        tolerance = EXACT if dtype == torch.float32 else IN_16_BITS
    limit = tolerance * max(1.0, float(reference.logits.abs().max()))
    return float((reference.logits - logits).abs().max()), limit


def storage_for(module: PreTrainedModel, reference: ReferenceForward, *, kernels: Kernels = "torch") -> PageStorage:
    """Return storage with room for the tokens of the check."""
    num_blocks = -(-len(reference.token_ids) // BLOCK_SIZE)
    return PageStorage(
        reference.shape,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=module.dtype,
        device=module.device,
        kernels=kernels,
        max_model_len=len(reference.token_ids),
    )


def compute_in_steps(
    reference: ReferenceForward,
    storage: PageStorage,
    compute: Callable[[Step, int], Tensor],
    *,
    chunks: Sequence[int] = CHUNKS,
) -> Tensor:
    """Compute the logits of all tokens chunk by chunk over a small storage, [tokens, vocab] float32.

    compute: a step's wanted logits, from the step and the position of its first token
    """
    num_blocks = -(-len(reference.token_ids) // BLOCK_SIZE)
    holding = Holding(0, blocks=list(range(num_blocks))[::-1])
    logits: list[Tensor] = []
    start = 0
    for length in chunks:
        length = min(length, len(reference.token_ids) - start)
        if length:
            step = _step_of(storage, holding, reference.token_ids, start, length)
            logits.append(compute(step, start)[step.logit_rows])  # back in order, if they came as asked for
            start += length
    return torch.cat(logits).float()


@contextmanager
def _refusing(module: PreTrainedModel) -> Iterator[None]:
    """Turn what the model cannot compute into a refusal; behind it, the model has its own attention again."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise ModelNotSupported(f"{module.config.model_type}: {error}") from error
    finally:
        module.set_attn_implementation("eager")


def _compute(module: PreTrainedModel, token_ids: Tensor, positions: Tensor, **chosen: Tensor) -> Tensor:
    output = module(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **chosen)
    logits: Tensor = output.logits[0]
    return logits


def _record(module: PreTrainedModel, token_ids: Tensor) -> _Recorder:
    current, recorder = CurrentStep(), _Recorder(text_config(module.config))
    attention = PackedAttention(current, KeyValueShape(layers=()))
    at = torch.arange(len(token_ids), device=module.device)
    mixes = ((),) * len(token_ids)
    step = Step(token_ids=token_ids, positions=at, places=at, logit_rows=at, mixes=mixes, attention=recorder)
    try:
        module.set_attn_implementation(attention.name)
        with giving_zeros(module), current.running(step):
            _compute(module, token_ids, at)
    finally:
        attention.close()
    return recorder


def _step_of(storage: PageStorage, holding: Holding, token_ids: Tensor, start: int, length: int) -> Step:
    end, device = start + length, token_ids.device
    places = torch.tensor(storage.places(holding, start, end), device=device)
    reading = Reading(first_token=0, place=0, blocks=holding.blocks, start=start, length=length)
    return Step(
        token_ids=token_ids[start:end],
        positions=torch.arange(start, end, device=device),
        places=places,
        logit_rows=torch.arange(length, device=device).flip(0),
        mixes=((),) * length,
        attention=storage.plan([reading], places),
    )


class _Recorder:
    """An `AttentionPlan` that notes what each layer asks for, and gives zeros."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._layers: list[LayerShape] = []
        self._keys: list[Tensor] = []  # of those layers: kept, so that no other tensor comes to lie where they do
        self._places: dict[int, int] = {}
        self._readers: set[int] = set()
        self.scorings: dict[int, Scoring] = {}

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        assert key is not None, "of a shape that says nothing of readers"
        assert value is not None, "as for keys"
        if layer in self._places:
            raise Unfit(f"layer {layer} attends more than once per token")
        self._check_window(layer, scoring.window)
        self.scorings[layer] = scoring
        self._note(layer, key, LayerShape(heads=key.shape[1], key_dim=key.shape[-1], value_dim=value.shape[-1]))
        return query.new_zeros(*query.shape[:2], value.shape[-1])

    def _check_window(self, number: int, handed: int | None) -> None:
        """Refuse a window that is lost on the way: if it is longer than the check's tokens, no logit shows it."""
        types = getattr(self._config, "layer_types", None)
        if types and types[number] == "sliding_attention" and handed is None:
            wanted = getattr(self._config, "sliding_window", None)
            if wanted is not None:
                raise Unfit(f"layer {number} hands attention no window, where config.json wants {wanted}")

    def _note(self, number: int, key: Tensor, shape: LayerShape) -> None:
        for place, earlier in enumerate(self._keys):
            if earlier.data_ptr() == key.data_ptr() and earlier.shape == key.shape:
                self._places[number] = place
                self._readers.add(number)
                return
        self._places[number] = len(self._layers)
        self._layers.append(shape)
        self._keys.append(key)

    def shape(self) -> KeyValueShape:
        if not self._places:
            raise Unfit(OTHER_WAY)
        across = set(getattr(self._config, "cross_attention_layers", None) or ())  # they attend to images alone
        if set(self._places) != set(range(int(self._config.num_hidden_layers))) - across:
            raise Unfit(f"only layers {sorted(self._places)} use AttentionInterface")
        moved = {number: place for number, place in self._places.items() if number != place}
        return KeyValueShape(layers=tuple(self._layers), places=moved, readers=frozenset(self._readers))


def settle(module: PreTrainedModel, reference: ReferenceForward, *, sums: Collectives | None = None) -> Scorings | None:
    """Lay a model's linears out and check it. Return what the loop is built with; None if it may not serve.

    sums: of a divided model, of which all shards are computed by the loop, or none

    Raises ModelNotSupported.
    """
    is_described = norm_offset_of(module) is not None
    lay_out(module, joins=is_described)
    reason = _try_loop(module, reference, sums) if is_described else None
    has_loop = is_described and reason is None
    if sums is not None:
        has_loop = bool(sums.least(has_loop))
    check(module, reference, chunks=FEW_CHUNKS if has_loop else CHUNKS)  # modules compute what recorders watch
    if reason is not None:
        logger.warning("%s: computed by transformers' modules, not by the loop: %s", module.config.model_type, reason)
    return reference.scorings if has_loop else None


@torch.inference_mode()
def _try_loop(module: PreTrainedModel, reference: ReferenceForward, sums: Collectives | None) -> str | None:
    """Return why the loop may not serve; None if it gives the model's own logits."""
    try:
        loop = build_loop(module, reference.shape, reference.scorings, sums=sums)
        ours = compute_in_steps(reference, storage_for(module, reference), lambda step, _: loop(step))
    except (NotDescribed, RuntimeError, AttributeError, TypeError, ValueError) as error:
        return str(error)
    difference, limit = distance(reference, ours, module.dtype)
    return None if difference <= limit else f"its logits are off by {difference:.2g} (allowed: {limit:.2g})"
