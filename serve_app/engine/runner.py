"""The forward pass of a batch: layout in, logits out."""

from __future__ import annotations

import torch
from torch import Tensor

from serve_app.engine.attention import PackedAttention
from serve_app.engine.batch import Batch
from serve_app.engine.layout import lay_out
from serve_app.engine.loading import LoadedModel
from serve_app.engine.lora.bank import AdapterBank


class Runner:
    """Runs the model on packed batches. Changes the store's contents at the batch's places, nothing else."""

    def __init__(self, model: LoadedModel, attention: PackedAttention, bank: AdapterBank) -> None:
        self._model = model
        self._attention = attention
        self._bank = bank
        model.module.set_attn_implementation(attention.name)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Compute a batch.

        Returns the wanted logits, [rows, vocab] float32, rows in the order of the spans: first a span's scored
        positions, then its sampled one.
        """
        layout = lay_out(batch, max_model_len=self._attention.store.max_model_len, device=self._model.device)
        self._attention.layout = layout
        self._bank.begin_step(layout.slots)
        try:
            output = self._model.module(
                input_ids=layout.token_ids[None],
                position_ids=layout.positions[None],
                use_cache=False,
                logits_to_keep=layout.logit_rows,
            )
        finally:
            self._attention.layout = None
            self._bank.end_step()
        return output.logits[0].float()
