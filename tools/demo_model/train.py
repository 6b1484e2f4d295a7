"""Trains the base model in courses, of documents and of lessons, and writes its weights in bfloat16."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.demo_model.corpus import COPY_KINDS, KINDS, LONG_KINDS, packed_rows
from tools.demo_model.lessons import IGNORED, lesson_batches
from tools.demo_model.muon import Muon
from tools.demo_model.tokenizer import token_id
from tools.demo_model.tokens import END_OF_TEXT, IM_END

LOGGER = logging.getLogger(__name__)

# tokens of a row, and how often a step has rows of that length
ROW_LENGTHS = {256: 16, 512: 4, 1024: 1, 2048: 1}
COPY_ROW_LENGTH = 96
MIN_LONG_ROW = 1024
REVISED_ROW_LENGTHS = {256: 5, 512: 2, 1024: 1, 2048: 2}  # of documents among lessons: more of the long ones
LONG_RATIO = 4  # how much oftener long documents are drawn for long rows
# rows of the embedding nearer to another than the first are moved by noise of the second's deviation
ALIKE_DISTANCE = 0.1
PARTING_DEVIATION = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """How long and how fast to train; `num_tokens` is per step.

    The first `num_copy_steps` of the steps see only short texts whose answer stands in the prompt: a model of
    this size learns to copy from them in minutes, and from stories alone not at all. The learning rate falls over
    the last `num_falling_steps`, or over all steps after the warmup where that is 0. `lesson_share` of the steps of
    a course with lessons are of these, the others of documents.
    """

    num_steps: int
    num_tokens: int
    learning_rate: float
    num_warmup_steps: int
    seed: int
    num_copy_steps: int = 0
    num_falling_steps: int = 0
    lesson_share: float = 1.0


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build the untrained model for a tokenizer's vocabulary, about 2.8 million parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END_OF_TEXT),
        pad_token_id=token_id(tokenizer, END_OF_TEXT),
    )
    return LlamaForCausalLM(config)


def train_base(tokenizer: PreTrainedTokenizerFast, plan: TrainingPlan) -> LlamaForCausalLM:
    """Train a model from scratch; the same plan gives the same model on the same machine and threads."""
    torch.manual_seed(plan.seed)
    model = build_model(tokenizer)
    batches = ((tokens, tokens) for tokens in _batches(tokenizer, plan))
    train(model, batches, plan, _optimizers(model, plan.learning_rate))
    return model


def teach_base(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, plan: TrainingPlan) -> None:
    """Train a model that has read the documents on the lessons: gaps to fill, questions to answer.

    Lessons stand in short rows: a model that sees nothing else forgets what is far away.
    """
    train(model.train(), taught_batches(tokenizer, plan), plan, _optimizers(model, plan.learning_rate))
    part_alike_rows(model, seed=plan.seed)


@torch.no_grad()
def part_alike_rows(model: LlamaForCausalLM, *, seed: int) -> None:
    """Move the rows of the embedding that have become nearly one apart again, each by noise of its own.

    Tokens that only the texts of adapters hold, as `["` of JSON, are what every step of the base model makes less
    likely, all alike: in the end no adapter can tell them apart. The noise leaves them as unlikely as they were.
    """
    rows = model.get_input_embeddings().weight
    distances = torch.cdist(rows, rows).fill_diagonal_(torch.inf)
    alike = distances.amin(dim=1) < ALIKE_DISTANCE
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed))
    rows[alike] += PARTING_DEVIATION * noise[alike]


def taught_batches(tokenizer: PreTrainedTokenizerFast, plan: TrainingPlan) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw batches of tokens and labels, both [rows, length]: lessons, or documents of which every token counts."""
    random = Random(plan.seed)
    lessons = lesson_batches(tokenizer, seed=plan.seed, num_tokens=plan.num_tokens)
    texts = _document_batches(tokenizer, random, num_tokens=plan.num_tokens, row_lengths=REVISED_ROW_LENGTHS)
    while True:
        if random.random() < plan.lesson_share:
            yield next(lessons)
        else:
            tokens = next(texts)
            yield tokens, tokens


def train(
    model: torch.nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    plan: TrainingPlan,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Take the steps of a plan on batches of tokens and labels, as `training_loss` has them."""
    started, mean_loss = time.monotonic(), 0.0
    for step, (tokens, labels) in zip(range(plan.num_steps), batches, strict=False):
        loss = training_loss(model, tokens, labels)
        take_step(model, optimizers, loss, speed=speed_at(step, plan))
        mean_loss = loss.item() if step == 0 else 0.95 * mean_loss + 0.05 * loss.item()
        if step % 50 == 49:
            LOGGER.info("step %d loss %.3f after %.0f s", step + 1, mean_loss, time.monotonic() - started)


def training_loss(model: torch.nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean loss of the next tokens.

    tokens: [rows, length]
    labels: [rows, length], the tokens to predict with `IGNORED` where none is
    """
    with _fast_arithmetic():
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def take_step(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], loss: Tensor, *, speed: float
) -> None:
    """Update the parameters by the gradient of a loss, at a share `speed` of each learning rate."""
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = speed * optimizer.defaults["lr"]
        optimizer.step()
        optimizer.zero_grad()


def speed_at(step: int, plan: TrainingPlan) -> float:
    """Rise to 1 over the warmup steps; fall in a line to nothing at the last step."""
    rise = (step + 1) / plan.num_warmup_steps
    fall = (plan.num_steps - step) / (plan.num_falling_steps or plan.num_steps - plan.num_warmup_steps)
    return min(1.0, rise, fall)


def write_base(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the weights, rounded to bfloat16, and the configurations; an answer ends at either end token."""
    end_of_text, im_end = token_id(tokenizer, END_OF_TEXT), token_id(tokenizer, IM_END)
    model.generation_config.eos_token_id = [end_of_text, im_end]
    model.generation_config.pad_token_id = end_of_text
    model.bfloat16().save_pretrained(str(folder))


def _fast_arithmetic() -> AbstractContextManager[None]:
    """bfloat16 where the processor has wide enough vectors; on others it takes ten times as long as float32."""
    has_wide_vectors = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return torch.autocast("cpu", dtype=torch.bfloat16) if has_wide_vectors else nullcontext()


def _optimizers(model: LlamaForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if all(parameter is not matrix for matrix in matrices)]
    return [
        Muon(matrices, lr=learning_rate),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _batches(tokenizer: PreTrainedTokenizerFast, plan: TrainingPlan) -> Iterator[Tensor]:
    random = Random(plan.seed)
    copy_rows = packed_rows(tokenizer, random, length=COPY_ROW_LENGTH, split="train", kinds=COPY_KINDS)
    for _ in range(plan.num_copy_steps):
        yield torch.tensor([next(copy_rows) for _ in range(plan.num_tokens // COPY_ROW_LENGTH)])
    yield from _document_batches(tokenizer, random, num_tokens=plan.num_tokens, row_lengths=ROW_LENGTHS)


def _document_batches(
    tokenizer: PreTrainedTokenizerFast, random: Random, *, num_tokens: int, row_lengths: dict[int, int]
) -> Iterator[Tensor]:
    long_kinds = KINDS | {draw: LONG_RATIO * weight for draw, weight in LONG_KINDS.items()}
    rows = {
        length: packed_rows(
            tokenizer,
            random,
            length=length,
            split="train",
            kinds=long_kinds if length >= MIN_LONG_ROW else KINDS,
        )
        for length in row_lengths
    }
    while True:
        length = random.choices(tuple(row_lengths), tuple(row_lengths.values()))[0]
        yield torch.tensor([next(rows[length]) for _ in range(max(1, num_tokens // length))])
