"""Keeps what a client asked to have recorded of a sequence's positions, until the sequence ends."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from serve_app.core.cards import RecordCard
from serve_app.core.delta import Recording
from serve_app.core.errors import InvalidRequest
from serve_app.core.request import GenerationRequest, HeadForm, RecordParams
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.classifier import Head
from serve_app.engine.decoder.text_part import text_config


class Record:
    """The record of one sequence. It takes every position once, in order; computing one again changes nothing.

    prompt_length: in tokens
    num_layers:    of the model, with experts or without
    head:          the model's classification head; None if it has none
    next:          the first position that was not taken
    is_finite:     whether all that it keeps are numbers
    """

    def __init__(self, params: RecordParams, prompt_length: int, *, num_layers: int, head: Head | None = None) -> None:
        self._params, self._head = params, head
        self._prompt_length = prompt_length
        self._num_layers = num_layers
        self._first = first_state(params, prompt_length)
        self._states: list[Tensor] = []  # float32 [positions, hidden] each, from `_first` on
        self._experts: list[Tensor] = []  # int32 [positions, layers, experts per token] each, from 0 on
        self._sum: Tensor | None = None  # float64 [hidden], of the prompt; or the highest numbers
        self.next = 0 if params.experts else self._first
        self.is_finite = True

    @property
    def wants_states(self) -> bool:
        return self._params.hidden_states is not None

    @property
    def wants_experts(self) -> bool:
        return self._params.experts

    def take(self, start: int, states: Tensor | None, experts: Mapping[int, Tensor]) -> None:
        """Take what a span gave.

        states:  [length, hidden] where they are wanted
        experts: by layer, [length, experts per token] each, where they are wanted and there are any
        """
        end = start + _length(states, experts)
        skipped = max(0, self.next - start)
        assert start <= self.next, f"positions {self.next} to {start} were never taken"
        if start + skipped >= end:
            return
        if states is not None:
            self._take_states(start + skipped, states[skipped:])
        if experts:
            self._experts.append(self._stacked({layer: chosen[skipped:] for layer, chosen in experts.items()}))
        self.next = end

    def fork(self, num_tokens: int) -> Record:
        """One of its own for a sequence that goes on behind the first `num_tokens` positions of this one."""
        child = Record(self._params, self._prompt_length, num_layers=self._num_layers, head=self._head)
        child._states = _first_rows(self._states, num_tokens - self._first)
        child._experts = _first_rows(self._experts, num_tokens)
        child.is_finite = self.is_finite
        child.next = max(child.next, min(self.next, num_tokens))
        return child

    def result(self) -> Recording:
        """Return what was asked for, of all positions that were taken."""
        states = self._wanted_states()
        if not self._experts:
            experts, shape = b"", (0, 0, 0)
        else:
            whole = torch.cat(self._experts)
            positions, layers, chosen = whole.shape
            experts, shape = whole.numpy().tobytes(), (positions, layers, chosen)
        return Recording(
            hidden_states=b"" if states is None else states.numpy().tobytes(),
            num_states=0 if states is None else len(states),
            experts=experts,
            experts_shape=shape,
        )

    def _take_states(self, start: int, states: Tensor) -> None:
        own = states[: self._prompt_length - start]
        match self._params.hidden_states:
            case "mean" | "mean_sqrt" | "weighted_mean" as kind:
                if kind == "weighted_mean":
                    weights = torch.arange(start + 1, start + 1 + len(own), dtype=torch.float64, device=own.device)
                    own = own.double() * weights[:, None]
                taken = own.sum(dim=0, dtype=torch.float64).cpu()
                self._sum = taken if self._sum is None else self._sum + taken
            case "max":
                taken = own.amax(dim=0).double().cpu()
                self._sum = taken if self._sum is None else torch.maximum(self._sum, taken)
            case "first":
                taken = _kept(states[:1])
                self._states = self._states or [taken]
            case "last":
                taken = _kept(states[-1:])
                self._states = [taken]
            case _:
                taken = _kept(states[max(0, self._first - start) :])
                self._states.append(taken)
        self.is_finite = self.is_finite and bool(torch.isfinite(taken).all())

    def _stacked(self, experts: Mapping[int, Tensor]) -> Tensor:
        """[positions, layers, experts per token] int32, with -1 where a layer has none."""
        chosen = next(iter(experts.values()))
        stacked = torch.full((len(chosen), self._num_layers, chosen.shape[1]), -1, dtype=torch.int32)
        for layer, each in experts.items():
            stacked[:, layer] = each.to("cpu", torch.int32)
        return stacked

    def _wanted_states(self) -> Tensor | None:
        """[states, hidden] float32"""
        if self._sum is not None:
            return self._shaped((self._sum / self._divisor)[None])
        if not self._states:
            return None
        states = torch.cat(self._states)
        return states if self._params.embedding is None else self._shaped(states)

    @property
    def _divisor(self) -> float:
        """Return what the sum over a prompt's positions is divided by."""
        length = self._prompt_length
        match self._params.hidden_states:
            case "mean_sqrt":
                return math.sqrt(length)
            case "weighted_mean":
                return length * (length + 1) / 2
            case "max":
                return 1
            case _:
                return length

    def _shaped(self, vector: Tensor) -> Tensor:
        """[1, hidden], cut and divided by its length as it is wanted; a vector of zeros stays one

        Where a head reads the state, [1, labels].
        """
        form = self._params.embedding
        if self._head is not None and isinstance(form, HeadForm):
            return self._head.scores(vector, form.activation)
        vector = vector.double()[:, : self._params.dimensions]
        if self._params.embedding is not None and self._params.embedding.normalizes:
            vector = vector / vector.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return vector.float()


def first_state(params: RecordParams, prompt_length: int) -> int:
    """The first position whose hidden state is wanted."""
    match params.hidden_states:
        case "mean" | "mean_sqrt" | "weighted_mean" | "max" | "first":
            return 0
        case "all":
            return max(0, prompt_length - params.echoed) if params.echoed else 0
        case "last" | "drawn" | None:
            return prompt_length - 1


def most_bytes(
    params: RecordParams, prompt_length: int, *, max_tokens: int, state_bytes: int, expert_bytes: int
) -> int:
    """Return the most bytes that one sequence may keep.

    state_bytes, expert_bytes: of one position
    """
    computed = prompt_length + max(0, max_tokens - 1)
    states = computed - first_state(params, prompt_length) if params.hidden_states in ("all", "drawn") else 1
    kept = states * state_bytes if params.hidden_states is not None else 0
    return kept + (computed * expert_bytes if params.experts else 0)


def _kept(states: Tensor) -> Tensor:
    """Copy states to the host's memory, so that those of the whole step can go."""
    return states.to("cpu", torch.float32, copy=True)


def _length(states: Tensor | None, experts: Mapping[int, Tensor]) -> int:
    if states is not None:
        return len(states)
    return len(next(iter(experts.values()))) if experts else 0


def _first_rows(pieces: list[Tensor], count: int) -> list[Tensor]:
    """The first so many rows of pieces that lie one behind the other; shared, not copied."""
    taken = []
    for piece in pieces:
        if count <= 0:
            break
        taken.append(piece[:count])
        count -= len(piece)
    return taken


NUMBER_BYTES = 4
CHOSEN_NAMES = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")
"""What configurations call the number of experts that a token is sent to."""
MOST_CHOSEN = 16
"""Taken where none of them is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBounds:
    """What a model can record of a position, and how much one request may record.

    hidden_size: numbers of a hidden state
    num_layers:  with experts or without
    num_chosen:  experts that a token is sent to; 0 where the model has none
    head:        its classification head; None if it has none
    max_bytes:   that one prompt with its completions may ask for
    """

    hidden_size: int
    num_layers: int
    num_chosen: int
    max_bytes: int
    head: Head | None = None

    @classmethod
    def of(cls, module: PreTrainedModel, *, max_bytes: int, head: Head | None = None) -> Self:
        text = text_config(module.config)
        num_chosen = next((int(found) for name in CHOSEN_NAMES if (found := getattr(text, name, None))), MOST_CHOSEN)
        return cls(
            hidden_size=hidden_size_of(module),
            num_layers=int(text.num_hidden_layers),
            num_chosen=num_chosen if expert_layers(module) else 0,
            max_bytes=max_bytes,
            head=head,
        )

    def records(self, request: GenerationRequest, prompt_length: int, *, max_tokens: int) -> list[Record | None]:
        """Return an empty record for each completion, or None if nothing is wanted that the model has.

        Raises InvalidRequest where they could come to more than is allowed.
        """
        wanted = self._wanted(request.record)
        if wanted is None:
            return [None] * request.n
        each = most_bytes(
            wanted,
            prompt_length,
            max_tokens=max_tokens,
            state_bytes=NUMBER_BYTES * self.hidden_size,
            expert_bytes=NUMBER_BYTES * self.num_layers * self.num_chosen,
        )
        if request.n * each > self.max_bytes:
            raise InvalidRequest.refusing(
                wanted.name,
                must=f"come to at most {self.max_bytes} bytes for a prompt with its completions",
                found=f"{request.n} × {each} for the {prompt_length} tokens of prompt {request.prompt_index} and"
                f" {max_tokens} generated ones",
                remedy='Ask for less, as "last" is, for fewer tokens, or for no echo; the operator sets the bound as'
                " max_recorded_bytes.",
                facts={"max_recorded_bytes": self.max_bytes},
            )
        return [Record(wanted, prompt_length, num_layers=self.num_layers, head=self.head) for _ in range(request.n)]

    def _wanted(self, params: RecordParams | None) -> RecordParams | None:
        """Return the wish without experts if the model has none."""
        if params is None or not params.experts or self.num_chosen:
            return params
        return None if params.hidden_states is None else replace(params, experts=False)


def record_card(config: EngineConfig, module: PreTrainedModel, *, head: Head | None = None) -> RecordCard:
    """Return what routers are told of recordings."""
    return RecordCard(
        returns_hidden_states=config.return_hidden_states,
        returns_routed_experts=config.return_routed_experts,
        hidden_size=hidden_size_of(module),
        embedding_sizes=embedding_sizes_of(module),
        head=None if head is None else head.form,
    )


def hidden_size_of(module: PreTrainedModel) -> int:
    """Return the size of the last layer's output, which the head reads."""
    head: Any = module.get_output_embeddings()
    if head is not None:
        return int(head.in_features) if hasattr(head, "in_features") else int(head.weight.shape[-1])
    return int(text_config(module.config).hidden_size)


def embedding_sizes_of(module: PreTrainedModel) -> tuple[int, ...]:
    """Return the sizes to which embeddings may be cut, as the configuration says; 0 stands for any."""
    config = module.config
    listed = getattr(config, "matryoshka_dimensions", None)
    if isinstance(listed, list) and all(isinstance(each, int) and each > 0 for each in listed):
        return tuple(listed)
    return (0,) if getattr(config, "is_matryoshka", False) is True else ()


CHOSEN = frozenset({"top_k_index", "router_indices"})
"""What transformers' families call the second argument of their experts: [tokens, experts per token] int64."""
NUMBER = re.compile(r"\.(\d+)\.")


def expert_layers(module: nn.Module) -> dict[int, nn.Module]:
    """The experts of each layer that has them, by the layer's number; called as (tokens, which experts, their weights).

    Empty for a dense model, and for a family whose experts are called in another way.
    """
    found = {}
    for name, part in module.named_modules():
        number = NUMBER.search(f"{name}.")
        is_wrapped = name.endswith(".base")  # what adapters change is called through what is around it
        if number is not None and not is_wrapped and _is_called_so(part):
            found[int(number[1])] = part
    return found


def _is_called_so(part: nn.Module) -> bool:
    parameters = list(inspect.signature(part.forward).parameters)
    return len(parameters) > 2 and parameters[1] in CHOSEN
