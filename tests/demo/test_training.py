"""How the demo model is trained: the optimizer, the schedule, and lessons that none of the report's prompts is in."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from random import Random

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.nn import Parameter

from tools.demo_model.chats import draw_fact_chat
from tools.demo_model.facts import draw_fact
from tools.demo_model.functions import draw_function, draw_function_text
from tools.demo_model.generate import load_model, load_tokenizer
from tools.demo_model.lessons import IGNORED, LESSONS, ROW_LENGTH, draw_gap, lesson_batches, lesson_rows
from tools.demo_model.muon import Muon, orthogonal
from tools.demo_model.report import BASE_CHECKS
from tools.demo_model.samples import split_of
from tools.demo_model.tokens import END_OF_TEXT, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX
from tools.demo_model.train import (
    ALIKE_DISTANCE,
    REVISED_ROW_LENGTHS,
    TrainingPlan,
    part_alike_rows,
    speed_at,
    taught_batches,
)

MODEL = Path(__file__).parents[2] / "serve_app" / "demo" / "model"


def whole(prompt: str, completion: str) -> str:
    """The text that a gap was cut into."""
    prefix, suffix = prompt.removeprefix(FIM_PREFIX).removesuffix(FIM_MIDDLE).split(FIM_SUFFIX)
    return prefix + completion.removesuffix(END_OF_TEXT) + suffix


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8), (1, 12, 12)])
def test_singular_values_come_near_to_one(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    factors = orthogonal(torch.randn(shape))
    assert factors.shape == shape
    values = torch.linalg.svdvals(factors)
    assert values.min() > 0.4
    assert values.max() < 1.4


@pytest.mark.parametrize("shapes", [[(8, 20), (8, 20), (20, 8)], [(12, 12)]])
def test_a_step_is_that_of_torchs_own_muon(shapes: list[tuple[int, int]]) -> None:
    """Which computes in bfloat16, one matrix after the other."""
    torch.manual_seed(1)
    start = [torch.randn(shape) for shape in shapes]
    ours, theirs = ([Parameter(matrix.clone()) for matrix in start] for _ in range(2))
    optimizers = [
        Muon(ours, lr=0.01),
        torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(3):
        gradients = [torch.randn(shape) for shape in shapes]
        for matrices, optimizer in zip((ours, theirs), optimizers, strict=True):
            for matrix, gradient in zip(matrices, gradients, strict=True):
                matrix.grad = gradient.clone()
            optimizer.step()
    for our, their, before in zip(ours, theirs, start, strict=True):
        moved = (their - before).norm()
        assert (our - their).norm() < 0.05 * moved


def test_the_learning_rate_is_held_and_then_falls_where_the_plan_says_so() -> None:
    plan = TrainingPlan(num_steps=100, num_tokens=1, learning_rate=1, num_warmup_steps=10, seed=0, num_falling_steps=20)
    speeds = [speed_at(step, plan) for step in range(100)]
    assert speeds[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert set(speeds[10:81]) == {1.0}
    assert speeds[80:] == pytest.approx([1 - 0.05 * step for step in range(20)])


@pytest.mark.parametrize("seed", range(3))
def test_a_function_with_a_gap_of_the_report_is_in_no_lesson_and_was_read_nowhere_in_whole(seed: int) -> None:
    random = Random(seed)
    taught = {whole((each := draw_gap(random)).prompt, each.completion) for _ in range(400)}
    asked = {
        whole((each := BASE_CHECKS["functions with a clear gap"](random)).prompt, each.completion) for _ in range(40)
    }
    assert not taught & asked
    read = [draw_function(random) for _ in range(3000)]
    assert {split_of(each.prompt) for each in read if each.text in asked} <= {"held_out"}
    assert {split_of(each.prompt) for each in read if each.text in taught} <= {"train"}


def test_functions_of_a_split_are_drawn_in_every_form() -> None:
    random = Random(5)
    texts = [draw_function_text(random, split="held_out") for _ in range(40)]
    assert any(text.startswith("#") for text in texts)
    assert any('"""' in text for text in texts)
    assert any(text.startswith("def") and '"""' not in text for text in texts)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.__name__)
def test_a_lesson_ends(lesson) -> None:  # type: ignore[no-untyped-def]
    random = Random(6)
    assert all(lesson(random).completion.endswith((END_OF_TEXT, "<|im_end|>\n")) for _ in range(20))


def test_of_lessons_only_what_follows_the_prompt_counts() -> None:
    tokenizer = load_tokenizer(MODEL)
    middle, seen = tokenizer.get_vocab()[FIM_MIDDLE], 0
    for tokens, labels in islice(lesson_rows(tokenizer, Random(7)), 20):
        assert len(tokens) == len(labels) == ROW_LENGTH
        assert all(label in (IGNORED, token) for token, label in zip(tokens, labels, strict=True))
        for place in range(ROW_LENGTH - 1):
            if tokens[place] == middle and labels[place] == IGNORED:
                seen += 1
                assert labels[place + 1] == tokens[place + 1]
                assert labels[max(0, place - 2) : place] == [IGNORED] * min(2, place)
    assert seen > 50


def test_documents_among_lessons_stand_in_long_rows_too_and_count_in_whole() -> None:
    tokenizer = load_tokenizer(MODEL)
    plan = TrainingPlan(num_steps=1, num_tokens=2048, learning_rate=1, num_warmup_steps=1, seed=9, lesson_share=0.5)
    batches = list(islice(taught_batches(tokenizer, plan), 60))
    lessons = [tokens for tokens, labels in batches if (labels == IGNORED).any()]
    documents = [tokens for tokens, labels in batches if not (labels == IGNORED).any()]
    assert 20 <= len(lessons) <= 40
    assert {tokens.shape[1] for tokens in lessons} == {ROW_LENGTH}
    assert {tokens.shape[1] for tokens in documents} == set(REVISED_ROW_LENGTHS)
    assert all(tokens.numel() == plan.num_tokens for tokens in documents)
    again = next(taught_batches(tokenizer, plan))
    assert torch.equal(again[0], batches[0][0])


def test_lessons_are_the_same_under_the_same_seed() -> None:
    tokenizer = load_tokenizer(MODEL)
    first, second, other = (next(lesson_batches(tokenizer, seed=seed, num_tokens=1024)) for seed in (1, 1, 2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], other[0])


def test_a_reply_is_in_the_words_of_its_question() -> None:
    random = Random(8)
    facts = [draw_fact(random) for _ in range(2000)]
    for fact in facts:
        assert fact.reply.endswith(f" {fact.answer}.")
        for word in (" + ", " plus ", " - ", " minus ", " * ", " times ", "colour of"):
            assert (word in fact.question) == (word in fact.reply)
    assert {fact.reply for fact in facts} & {draw_fact_chat(random).completion.split("<")[0] for _ in range(500)}


def test_rows_that_have_become_nearly_one_are_parted_and_the_others_stay() -> None:
    model = load_model(MODEL)
    rows = model.get_input_embeddings().weight
    with torch.no_grad():
        rows[100:110] = rows[100] + 0.001 * torch.randn(10, rows.shape[1], generator=torch.Generator().manual_seed(1))
    before = rows.detach().clone()
    part_alike_rows(model, seed=2)
    moved = (rows != before).any(dim=1)
    assert moved[100:110].all()
    assert moved.sum() == 10
    assert torch.cdist(rows, rows).fill_diagonal_(torch.inf).min() > ALIKE_DISTANCE
    assert model.lm_head.weight is rows
    first = rows.detach().clone()
    part_alike_rows(model, seed=3)
    assert torch.equal(rows, first)


def test_an_adapter_can_tell_every_token_of_the_stored_model_from_every_other() -> None:
    rows = load_model(MODEL).get_input_embeddings().weight.detach()
    assert torch.cdist(rows, rows).fill_diagonal_(torch.inf).min() > ALIKE_DISTANCE
