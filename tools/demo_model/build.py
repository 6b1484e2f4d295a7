"""Builds the demo model step by step: tokenizer, base model, adapters, lessons, report, cards."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from tools.demo_model.adapters import train_adapter, write_adapter
from tools.demo_model.behaviours import BEHAVIOURS
from tools.demo_model.card import write_cards
from tools.demo_model.generate import load_model, load_tokenizer
from tools.demo_model.report import measure, write_report
from tools.demo_model.tokenizer import train_tokenizer
from tools.demo_model.train import TrainingPlan, teach_base, train_base, write_base

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the parts are written."""

    model: Path
    adapters: Path
    report: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtPlan:
    """Courses with lessons, one after the other, and how each adapter is then brought to the base model after them."""

    courses: tuple[TrainingPlan, ...]
    adapter: TrainingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """How much work each step does."""

    base: TrainingPlan
    adapter: TrainingPlan
    taught: tuple[TaughtPlan, ...]
    num_prompts: int


FULL = BuildPlan(
    base=TrainingPlan(
        num_steps=2400, num_tokens=2048, learning_rate=3e-3, num_warmup_steps=30, seed=0, num_copy_steps=500
    ),
    adapter=TrainingPlan(num_steps=260, num_tokens=2048, learning_rate=3e-3, num_warmup_steps=20, seed=1),
    taught=(
        TaughtPlan(
            courses=(
                TrainingPlan(
                    num_steps=876,
                    num_tokens=2048,
                    learning_rate=2e-3,
                    num_warmup_steps=20,
                    seed=2,
                    num_falling_steps=580,
                ),
            ),
            adapter=TrainingPlan(num_steps=80, num_tokens=2048, learning_rate=2e-3, num_warmup_steps=5, seed=3),
        ),
        TaughtPlan(
            courses=(
                TrainingPlan(
                    num_steps=710,
                    num_tokens=2048,
                    learning_rate=2e-3,
                    num_warmup_steps=20,
                    seed=4,
                    num_falling_steps=355,
                    lesson_share=0.5,
                ),
                TrainingPlan(
                    num_steps=856,
                    num_tokens=2048,
                    learning_rate=1.5e-3,
                    num_warmup_steps=20,
                    seed=5,
                    num_falling_steps=428,
                    lesson_share=0.75,
                ),
            ),
            adapter=TrainingPlan(num_steps=400, num_tokens=2048, learning_rate=2e-3, num_warmup_steps=5, seed=6),
        ),
    ),
    num_prompts=120,
)
QUICK = BuildPlan(
    base=TrainingPlan(num_steps=20, num_tokens=2048, learning_rate=3e-3, num_warmup_steps=5, seed=0, num_copy_steps=5),
    adapter=TrainingPlan(num_steps=5, num_tokens=1024, learning_rate=3e-3, num_warmup_steps=2, seed=1),
    taught=(
        TaughtPlan(
            courses=(
                TrainingPlan(
                    num_steps=10, num_tokens=2048, learning_rate=2e-3, num_warmup_steps=2, seed=2, lesson_share=0.5
                ),
            ),
            adapter=TrainingPlan(num_steps=5, num_tokens=1024, learning_rate=2e-3, num_warmup_steps=2, seed=3),
        ),
    ),
    num_prompts=8,
)


def build(plan: BuildPlan, places: Places) -> None:
    """Build all parts; what stands in their places is overwritten."""
    started = time.monotonic()
    tokenizer = train_tokenizer(places.model, seed=plan.base.seed)
    write_base(train_base(tokenizer, plan.base), tokenizer, places.model)
    LOGGER.info("base model written after %.1f minutes", (time.monotonic() - started) / 60)
    build_adapters(plan, places)
    build_lessons(plan, places)
    build_report(plan, places)
    LOGGER.info("done after %.1f minutes", (time.monotonic() - started) / 60)


def build_adapters(plan: BuildPlan, places: Places) -> None:
    """Train every adapter on the base model that stands in its place."""
    for name, behaviour in BEHAVIOURS.items():
        LOGGER.info("adapter %s", name)
        write_adapter(train_adapter(behaviour, places.model, plan=plan.adapter), places.adapters / name)


def build_lessons(plan: BuildPlan, places: Places) -> None:
    """Teach the base model that stands in its place, and bring every adapter from the base before to that after."""
    for number, taught in enumerate(plan.taught, start=1):
        tokenizer, model = load_tokenizer(places.model), load_model(places.model)
        for course in taught.courses:
            LOGGER.info("lessons %d, of %d steps", number, course.num_steps)
            teach_base(model, tokenizer, course)
        write_base(model, tokenizer, places.model)
        for name, behaviour in BEHAVIOURS.items():
            LOGGER.info("adapter %s after lessons %d", name, number)
            folder = places.adapters / name
            adapter = train_adapter(behaviour, places.model, plan=taught.adapter, start=folder)
            write_adapter(adapter, folder)


def build_report(plan: BuildPlan, places: Places) -> None:
    """Measure what stands in its places, and write the report and the cards."""
    report = measure(places.model, places.adapters, num_prompts=plan.num_prompts)
    write_report(report, places.report)
    write_cards(report, places.model, places.adapters)
