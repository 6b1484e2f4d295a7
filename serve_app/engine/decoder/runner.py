"""Runs the forward pass of a batch: a step in, logits out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.attention import PackedAttention
from serve_app.engine.decoder.graphs import Capture, CudaCapture, DecodeGraphs
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.decoder.loop import DecoderLoop, build_loop
from serve_app.engine.decoder.step import CurrentStep, Layout, Step, lay_images, pack
from serve_app.engine.kv.pages import PageStorage
from serve_app.engine.kv.storage import Storage
from serve_app.engine.lora.pool import AdapterBank
from serve_app.engine.scheduler.sequence import Batch


class Runner:
    """Runs the model on packed batches. Changes the storage's contents at the batch's places, nothing else."""

    def __init__(self, model: LoadedModel, storage: Storage, bank: AdapterBank) -> None:
        self._model = model
        self._storage = storage
        self._bank = bank
        self._current = CurrentStep()
        self._attention = PackedAttention(self._current, model.shape)
        model.module.set_attn_implementation(self._attention.name)
        self._workers = model.workers
        self.graphs: DecodeGraphs | None = None
        self._loop: DecoderLoop | None = None
        self.renew()

    def renew(self) -> None:
        """Look the model's modules up anew, as adapters were wrapped around more of them."""
        model = self._model
        if model.scorings is not None:
            adapt = self._bank.begin_step
            self._loop = build_loop(model.module, model.shape, model.scorings, sums=model.sums, adapt=adapt)

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        """Within it the model is computed by transformers alone, of whole prompts and without the store."""
        self._model.module.set_attn_implementation("eager")
        try:
            yield
        finally:
            self._model.module.set_attn_implementation(self._attention.name)

    @torch.inference_mode()
    def record_steps(self, capture: Capture, *, num_places: int) -> None:
        """From now on have steps that decode computed by graphs, where they are of the loop's and of nothing else.

        num_places: sequences that may run at once
        """
        if self._loop is None or self._workers is not None or not isinstance(self._storage, PageStorage):
            return
        self.graphs = DecodeGraphs(
            self._compute_in_loop,
            self._storage,
            self._bank,
            capture,
            num_places=num_places,
            max_model_len=self._model.max_model_len,
            device=self._model.device,
        )
        self.graphs.prepare()

    def _compute_in_loop(self, step: Step) -> Tensor:
        assert self._loop is not None, "graphs are of the loop"
        return self._loop(step).float()

    @property
    def has_loop(self) -> bool:
        """Whether steps are computed by the loop, but for those of which somebody wants more than logits."""
        return self._loop is not None

    @torch.inference_mode()
    def forward(self, batch: Batch, token_ids: Tensor | None = None) -> Tensor:
        """Compute a batch; where the model is divided, with the other shards.

        token_ids: [tokens] int64, on the device, in the place of those that sequences have; not of a divided model

        Returns the wanted logits, [rows, vocab] float32, rows in the order of the spans: first a span's scored
        positions, then its sampled one.
        """
        layout, device = pack(batch, self._storage), self._model.device
        images = lay_images(batch, layout.positions, device=device)
        is_recorded = any(span.sequence.record is not None for span in batch.spans)
        by_modules = self._loop is None or is_recorded or images.rope_positions is not None
        if self.graphs is not None and not by_modules and images.embeddings is None:
            logits = self.graphs.logits(layout, token_ids)
            if logits is not None:
                return logits
        with self._workers.computing(layout, by_modules=by_modules) if self._workers else nullcontext():
            step = layout.step(self._storage, device=device, images=images)
            step = step if token_ids is None else replace(step, token_ids=token_ids)
            with self._adapted(step):
                logits = self._compute(step) if self._loop is None or by_modules else self._loop(step)
        return logits.float()

    @torch.inference_mode()
    def follow(self, layout: Layout, *, by_modules: bool) -> None:
        """Compute a step of which another shard has the logits: whatever is summed with its parts, and no more."""
        step = layout.step(self._storage, device=self._model.device)
        with self._adapted(step):
            if self._loop is None or by_modules:
                self._compute(step)
            else:
                self._loop.stream(step)

    @contextmanager
    def _adapted(self, step: Step) -> Iterator[None]:
        self._bank.begin_step(step.mixes)
        try:
            yield
        finally:
            self._bank.end_step()

    def _compute(self, step: Step) -> Tensor:
        """By transformers' modules, which recorders watch and which know rotations in three dimensions."""
        with self._current.running(step), self._bank.at_head(step.logit_mixes):
            output: Any = self._model.module(
                **self._tokens(step),
                position_ids=step.positions[None] if step.rope_positions is None else step.rope_positions[:, None],
                use_cache=False,
                logits_to_keep=step.logit_rows,
            )
        logits: Tensor = output.logits
        return logits[0]

    def _tokens(self, step: Step) -> dict[str, Tensor]:
        """The step's tokens by their ids, or embedded where some have no id that says what they are."""
        if step.embeddings is None or step.illustrated is None:
            return {"input_ids": step.token_ids[None]}
        embed: Any = self._model.module.get_input_embeddings()
        embedded: Tensor = embed(step.token_ids)
        return {"inputs_embeds": embedded.index_copy(0, step.illustrated, step.embeddings)[None]}

    def close(self) -> None:
        """Give the model its own attention back."""
        self._model.module.set_attn_implementation("eager")
        self._attention.close()


def record_on_gpus(runner: Runner, config: EngineConfig, model: LoadedModel) -> None:
    """Have steps that decode computed by CUDA graphs, where kernels follow the block tables."""
    if config.graphs == "auto" and model.device.type == "cuda" and model.kernels != "torch":
        runner.record_steps(CudaCapture(), num_places=config.num_places)
