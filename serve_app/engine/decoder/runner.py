"""Runs steps: the forward pass of a batch, what is recorded of it, and steps that overlap."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from serve_app.core.delta import Delta
from serve_app.engine.decoder.graphs import Capture, DecodeGraphs
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.decoder.loop import DecoderLoop, build_loop
from serve_app.engine.decoder.record import expert_layers
from serve_app.engine.decoder.step import CurrentStep, Layout, PackedAttention, Step, lay_images, pack
from serve_app.engine.kv.pages import PageStorage
from serve_app.engine.kv.storage import Holding, Storage
from serve_app.engine.lora.pool import AdapterBank
from serve_app.engine.sampling.masks import MaskComputer
from serve_app.engine.sampling.sampler import Begun, Launched
from serve_app.engine.scheduler.scheduler import Scheduler
from serve_app.engine.scheduler.sequence import Batch, Sequence, Span
from serve_app.engine.speculation.verification import Verifier


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
        return self._loop(step)

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
    def run_shard(self, layout: Layout, *, by_modules: bool) -> None:
        """Compute this shard's parts of a step's sums, and no logits: the first shard has those."""
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
        """Compute by transformers' modules, which recorders watch and which rotate in three dimensions."""
        rope_positions = step.images.rope_positions
        with self._current.running(step), self._bank.at_head(step.logit_mixes):
            output: Any = self._model.module(
                **self._tokens(step),
                position_ids=step.positions[None] if rope_positions is None else rope_positions[:, None],
                use_cache=False,
                logits_to_keep=step.logit_rows,
            )
        logits: Tensor = output.logits
        return logits[0]

    def _tokens(self, step: Step) -> dict[str, Tensor]:
        """Return the step's tokens by their ids, or embedded if some are part of an image."""
        if step.images.embeddings is None:
            return {"input_ids": step.token_ids[None]}
        embed: Any = self._model.module.get_input_embeddings()
        return {"inputs_embeds": step.images.put_into(embed(step.token_ids))[None]}

    def close(self) -> None:
        """Give the model its own attention back."""
        self._model.module.set_attn_implementation("eager")
        self._attention.close()


class Recorder:
    """Hooks are on the model while a batch is computed of which somebody wants something, and never else."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._decoder: nn.Module = module.get_decoder()
        self.renew()

    def renew(self) -> None:
        """Look for experts anew, as adapters were wrapped around some."""
        self._experts = expert_layers(self._module)

    @contextmanager
    def watching(self, batch: Batch) -> Iterator[None]:
        """Watch a batch being computed; behind it, every record of the batch has its own part."""
        if all(span.sequence.record is None for span in batch.spans):
            yield
            return
        records = [record for span in batch.spans if (record := span.sequence.record) is not None]
        states: list[Tensor] = []
        experts: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            if any(record.wants_states for record in records):
                hooks.callback(self._decoder.register_forward_hook(partial(_note_states, states)).remove)
            if any(record.wants_experts for record in records):
                for layer, part in self._experts.items():
                    hooks.callback(part.register_forward_pre_hook(partial(_note_experts, experts, layer)).remove)
            yield
        _hand_out(batch, states[0] if states else None, experts)


def _hand_out(batch: Batch, states: Tensor | None, experts: dict[int, Tensor]) -> None:
    """Give every span's rows to its record.

    states: [tokens, hidden];  experts: by layer, [tokens, experts per token]
    """
    first = 0
    for span in batch.spans:
        record, end = span.sequence.record, first + span.length
        if record is not None:
            record.take(
                span.start,
                states[first:end] if states is not None and record.wants_states else None,
                {layer: chosen[first:end] for layer, chosen in experts.items()} if record.wants_experts else {},
            )
        first += span.num_computed


def _note_states(found: list[Tensor], _: nn.Module, __: Any, output: Any) -> None:
    states = output.last_hidden_state if isinstance(output, ModelOutput) else output[0]
    found.append(states[0])


def _note_experts(found: dict[int, Tensor], layer: int, _: nn.Module, arguments: tuple[Any, ...]) -> None:
    found[layer] = arguments[1].reshape(-1, arguments[1].shape[-1])


UNKNOWN = 0
"""A token that only the device knows yet."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was launched and not yet collected.

    holdings: of each span's sequence, then
    before:   the draws that its tokens were taken from, and each span's row among them; None where the host knew them
    """

    batch: Batch
    begun: Begun
    holdings: Items[Holding | None]
    before: tuple[Launched, Items[int]] | None = None

    def standing(self) -> list[bool]:
        """Return of each span whether it still is what comes next of its sequence, which lost neither place nor draw.

        To be asked when the step before has been collected.
        """
        if self.before is None:  # nothing has happened since
            return [True] * len(self.batch.spans)
        launched, rows = self.before
        drawn = launched.tokens_on_device()
        facts = zip(self.batch.spans, self.holdings, rows, strict=True)
        return [_stands(span, holding, drawn[row]) for span, holding, row in facts]


class AsyncSteps:
    """Launches and collects an engine's steps, one behind the other.

    1. launch: begin the masks, have the runner compute, begin the draws;
    2. overlap: on a device, prepare and launch the next step with the tokens as they lie there;
    3. collect: wait for the draws and commit them; while guesses come true, draw and commit again.

    The host learns a step late that a token ended its text. Such a sequence has computed a token too many, which is
    dropped. Its keys and values lie beyond what counts as computed, and the next to come overwrites them.

    runs_ahead: whether a step may be launched before the last one is collected
    num_overlapped, num_dropped: steps launched so, and their tokens that were computed for nothing
    """

    def __init__(
        self,
        scheduler: Scheduler,
        masks: MaskComputer,
        recorder: Recorder,
        runner: Runner,
        verifier: Verifier,
        *,
        runs_ahead: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._masks = masks
        self._recorder = recorder
        self._runner = runner
        self._verifier = verifier
        self._next: LaunchedStep | None = None
        self.runs_ahead = runs_ahead
        self.num_overlapped = self.num_dropped = 0

    @property
    def is_ahead(self) -> bool:
        return self._next is not None

    def take_launched(self) -> LaunchedStep | None:
        """Return the step that was launched already, if any."""
        found, self._next = self._next, None
        return found

    def launch(self, batch: Batch) -> LaunchedStep:
        masks = self._masks.begin(batch)
        with self._recorder.watching(batch):
            logits = self._runner.forward(batch)
        begun = self._verifier.sampler.begin(logits, batch, masks)
        return LaunchedStep(batch, begun, [span.sequence.place.holding for span in batch.spans])

    def overlap(self, step: LaunchedStep) -> LaunchedStep:
        """Launch the step behind one that is not collected yet, if that is known; return the one, whose logits stay."""
        going = self._going_on(step) if self.runs_ahead else []
        launched = step.begun.launched
        if not going or launched is None:
            return step
        if self._runner.graphs is not None and any(not s.request.sampling.is_greedy for s, _ in step.begun.usual):
            step = replace(step, begun=replace(step.begun, logits=step.begun.logits.clone()))
        rows = [row for row, _ in going]
        with _presumed([span.sequence for _, span in going]):
            batch = Batch(tuple(Span(span.sequence, span.end, 1, samples=True) for _, span in going))
            begun = self._verifier.sampler.begin(self._runner.forward(batch, launched.take(rows)), batch, None)
        holdings = [span.sequence.place.holding for span in batch.spans]
        self._next = LaunchedStep(batch, begun, holdings, (launched, rows))
        self.num_overlapped += 1
        return step

    def collect(self, step: LaunchedStep) -> tuple[Batch, list[Delta]]:
        """Wait for a step; return what of it stands, and what that gave."""
        standing = step.standing()
        deltas = self._verifier.finish(step.begun, standing)
        spans = tuple(span for span, stands in zip(step.batch.spans, standing, strict=True) if stands)
        self.num_dropped += len(standing) - len(spans)
        return replace(step.batch, spans=spans), deltas

    def discard(self) -> None:
        """Drop what was launched."""
        self._next = None

    def _going_on(self, step: LaunchedStep) -> list[tuple[int, Span]]:
        """Return the spans, with their rows, that can be computed further with nothing but their next token.

        Return none if the scheduler might do anything else than go on with all.
        """
        scheduler, spans = self._scheduler, step.batch.spans
        if len(scheduler.waiting) or len(scheduler.running) != len(spans) or step.begun.others:
            return []
        if not all(_is_single(span) and _is_free(span.sequence) for span in spans) or not all(step.standing()):
            return []
        going = [
            (row, span) for row, span in enumerate(spans) if span.sequence.num_generated + 1 < span.sequence.max_tokens
        ]
        if not all(scheduler.reserve(span.sequence, span.sequence.num_tokens + 1) for _, span in going):
            return []
        return going


def _stands(span: Span, holding: Holding | None, token_id: int) -> bool:
    """token_id: which its token was on the device"""
    sequence = span.sequence
    if sequence.is_finished or sequence.place.holding is not holding or sequence.num_computed != span.start:
        return False
    return sequence.token_ids[span.start] == token_id


def _is_single(span: Span) -> bool:
    """Return whether it is a token of a text, and the next one is all that is wanted of it."""
    return span.decodes and span.samples and span.length == 1 and not span.scores and not span.draft


def _is_free(sequence: Sequence) -> bool:
    """Return whether the next draw depends on no token but by keys and values, and nothing else reads each token."""
    state = sequence.sampling_state
    sees_tokens = (state.repetition, state.occurrence, state.repeats, state.bad_words)
    is_watched = (sequence.matcher, sequence.record, sequence.illustration)
    if any(each is not None for each in (*sees_tokens, *is_watched)):
        return False
    return not (sequence.forks or sequence.prediction or sequence.num_held)


@contextmanager
def _presumed(sequences: Items[Sequence]) -> Iterator[None]:
    """Let each have the token that is being drawn, as far as counting goes."""
    for sequence in sequences:
        sequence.token_ids.append(UNKNOWN)
        sequence.num_computed += 1
    try:
        yield
    finally:
        for sequence in sequences:
            sequence.token_ids.pop()
            sequence.num_computed -= 1
