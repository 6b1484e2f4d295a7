"""Measures the demo model and its adapters on held-out prompts and writes `report.json`."""

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from peft import PeftModel
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from tools.demo_model.behaviours import BEHAVIOURS, Behaviour
from tools.demo_model.chats import draw_fact_chat
from tools.demo_model.corpus import KINDS, LONG_KINDS, fim_sample, fim_sample_between_words, packed_rows
from tools.demo_model.facts import draw_question, draw_statement
from tools.demo_model.functions import draw_function, draw_function_text, every_function_text
from tools.demo_model.generate import complete, load_model, load_tokenizer
from tools.demo_model.samples import Draw, Sample, draw_from_split
from tools.demo_model.stories import draw_story
from tools.demo_model.tokens import END_OF_TEXT, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX, IM_END

REPORT_SEED = 20_000
POSITION_BOUNDS = (0, 64, 256, 1024, 2048)
NUM_SHORT_ROWS = 32
NUM_LONG_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRates:
    """How often the base model ends by itself, and how often just as the corpus does; from 0 to 1."""

    num_prompts: int
    ended: float
    exact: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BehaviourRates:
    """How often a behaviour shows on the same prompts with and without its adapter; rates from 0 to 1."""

    num_prompts: int
    with_adapter: float
    without_adapter: float
    ended_with_adapter: float
    exact_with_adapter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was measured; `loss` is in nats per token of held-out text, by kind and place of tokens."""

    num_parameters: int
    vocab_size: int
    loss: dict[str, float]
    base: dict[str, BaseRates]
    adapters: dict[str, BehaviourRates]


def measure(model_folder: Path, adapters_folder: Path, *, num_prompts: int) -> Report:
    """Measure the stored weights, loaded as float32."""
    tokenizer, model = load_tokenizer(model_folder), load_model(model_folder)
    base = {name: base_rates(model, tokenizer, draw, num_prompts=num_prompts) for name, draw in BASE_CHECKS.items()}
    return Report(
        num_parameters=model.num_parameters(),
        vocab_size=len(tokenizer),
        loss=held_out_loss(model, tokenizer),
        base=base,
        adapters={
            name: behaviour_rates(
                behaviour,
                load_model(model_folder),
                adapters_folder / name,
                tokenizer=tokenizer,
                num_prompts=num_prompts,
            )
            for name, behaviour in BEHAVIOURS.items()
        },
    )


def write_report(report: Report, path: Path) -> None:
    path.write_text(json.dumps(asdict(report), indent=2) + "\n")


def held_out_samples(draw: Draw, num_samples: int) -> list[Sample]:
    """Draw samples of different prompts, none of which is ever trained on."""
    random, samples = Random(REPORT_SEED), dict[str, Sample]()
    while len(samples) < num_samples:
        sample = draw_from_split(draw, random, split="held_out")
        samples.setdefault(sample.prompt, sample)
    return list(samples.values())


def base_rates(model: Any, tokenizer: PreTrainedTokenizerFast, draw: Draw, *, num_prompts: int) -> BaseRates:
    """Complete held-out prompts with the base model."""
    samples = held_out_samples(draw, num_prompts)
    completions = complete(model, tokenizer, [sample.prompt for sample in samples])
    exact = [
        completion.text == sample.completion.removesuffix(END_OF_TEXT).removesuffix(f"{IM_END}\n")
        for sample, completion in zip(samples, completions, strict=True)
    ]
    return BaseRates(
        num_prompts=num_prompts,
        ended=_share([completion.is_ended for completion in completions]),
        exact=_share(exact),
    )


def behaviour_rates(
    behaviour: Behaviour,
    model: Any,
    adapter: Path,
    *,
    tokenizer: PreTrainedTokenizerFast,
    num_prompts: int,
) -> BehaviourRates:
    """Complete the same held-out prompts without and with an adapter; the adapter stays on the model."""
    samples = held_out_samples(behaviour.draw, num_prompts)
    prompts = [sample.prompt for sample in samples]
    without = complete(model, tokenizer, prompts)
    adapted = PeftModel.from_pretrained(model, str(adapter)).eval()
    completions = complete(adapted, tokenizer, prompts)
    return BehaviourRates(
        num_prompts=num_prompts,
        with_adapter=_share([behaviour.is_shown(completion.text) for completion in completions]),
        without_adapter=_share([behaviour.is_shown(completion.text) for completion in without]),
        ended_with_adapter=_share([completion.is_ended for completion in completions]),
        exact_with_adapter=_share(
            [completion.text == sample.completion for sample, completion in zip(samples, completions, strict=True)]
        ),
    )


def held_out_loss(model: Any, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Measure the mean loss of short documents, and of long ones by the place of the token in its row."""
    random = Random(REPORT_SEED)
    short = packed_rows(tokenizer, random, length=256, split="held_out", kinds=KINDS)
    long = packed_rows(tokenizer, random, length=POSITION_BOUNDS[-1], split="held_out", kinds=LONG_KINDS)
    losses = _losses(model, [next(short) for _ in range(NUM_SHORT_ROWS)])
    long_losses = torch.cat([_losses(model, [next(long)]) for _ in range(NUM_LONG_ROWS)])
    means = {"short documents": losses.mean().item()}
    for start, stop in pairwise(POSITION_BOUNDS):
        means[f"long documents, tokens {start} to {stop}"] = long_losses[:, start : stop - 1].mean().item()
    return {kind: round(mean, 3) for kind, mean in means.items()}


def _losses(model: Any, rows: list[list[int]]) -> torch.Tensor:
    """Losses of the next tokens: [rows, length - 1]."""
    tokens = torch.tensor(rows)
    with torch.inference_mode():
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


def _share(claims: list[bool]) -> float:
    return round(sum(claims) / len(claims), 4)


def draw_gap(random: Random) -> Sample:
    """Draw a gap anywhere in a function that was never read in whole."""
    return fim_sample(draw_function_text(random, split="held_out"), random)


def draw_clear_gap(random: Random) -> Sample:
    """Draw a gap between words in such a function, of those that one text of the corpus alone fits.

    These are about half; of the others nobody could say what was cut out.
    """
    while True:
        sample = fim_sample_between_words(draw_function_text(random, split="held_out"), random)
        prefix, suffix = sample.prompt.removeprefix(FIM_PREFIX).removesuffix(FIM_MIDDLE).split(FIM_SUFFIX)
        least = len(prefix) + len(suffix)
        fitting = [
            text
            for text in every_function_text()
            if len(text) >= least and text.startswith(prefix) and text.endswith(suffix)
        ]
        if len(fitting) == 1:
            return sample


BASE_CHECKS: dict[str, Draw] = {
    "statements": draw_statement,
    "questions": draw_question,
    "questions in a chat": draw_fact_chat,
    "functions": draw_function,
    "functions with a gap": draw_gap,
    "functions with a clear gap": draw_clear_gap,
    "stories": draw_story,
}
