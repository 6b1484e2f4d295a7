"""Bounds what is kept of a request's computation for its client, before anything of it is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from transformers import PreTrainedModel

from serve_app.core.cards import RecordCard
from serve_app.core.errors import InvalidRequest
from serve_app.core.request import GenerationRequest, RecordParams
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.experts import expert_layers
from serve_app.engine.decoder.record import Record, most_bytes
from serve_app.engine.decoder.text_part import text_config

NUMBER_BYTES = 4
CHOSEN_NAMES = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")
"""What configurations call the number of experts that a token is sent to."""
MOST_CHOSEN = 16
"""Taken where none of them is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBounds:
    """hidden_size: numbers of a hidden state
    num_layers:  with experts or without
    num_chosen:  experts that a token is sent to; 0 where the model has none
    max_bytes:   that one prompt with its completions may ask for
    """

    hidden_size: int
    num_layers: int
    num_chosen: int
    max_bytes: int

    @classmethod
    def of(cls, module: PreTrainedModel, *, max_bytes: int) -> Self:
        text = text_config(module.config)
        num_chosen = next((int(found) for name in CHOSEN_NAMES if (found := getattr(text, name, None))), MOST_CHOSEN)
        return cls(
            hidden_size=hidden_size_of(module),
            num_layers=int(text.num_hidden_layers),
            num_chosen=num_chosen if expert_layers(module) else 0,
            max_bytes=max_bytes,
        )

    def records(self, request: GenerationRequest, prompt_length: int, *, max_tokens: int) -> list[Record | None]:
        """An empty one for each completion, or None where nothing is wanted that the model has.

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
        return [Record(wanted, prompt_length, num_layers=self.num_layers) for _ in range(request.n)]

    def _wanted(self, params: RecordParams | None) -> RecordParams | None:
        """Without experts where the model has none."""
        if params is None or not params.experts or self.num_chosen:
            return params
        return None if params.hidden_states is None else replace(params, experts=False)


def record_card(config: EngineConfig, module: PreTrainedModel) -> RecordCard:
    """What routers are told of it."""
    return RecordCard(
        returns_hidden_states=config.return_hidden_states,
        returns_routed_experts=config.return_routed_experts,
        hidden_size=hidden_size_of(module),
        embedding_sizes=embedding_sizes_of(module),
    )


def hidden_size_of(module: PreTrainedModel) -> int:
    """Numbers of what the last layer gives, which is what the head reads."""
    head: Any = module.get_output_embeddings()
    if head is not None:
        return int(head.in_features) if hasattr(head, "in_features") else int(head.weight.shape[-1])
    return int(text_config(module.config).hidden_size)


def embedding_sizes_of(module: PreTrainedModel) -> tuple[int, ...]:
    """To which its embeddings may be cut, as its configuration says; 0 stands for any."""
    config = module.config
    listed = getattr(config, "matryoshka_dimensions", None)
    if isinstance(listed, list) and all(isinstance(each, int) and each > 0 for each in listed):
        return tuple(listed)
    return (0,) if getattr(config, "is_matryoshka", False) is True else ()
