"""The notebook about training, in a few steps: its cells train, and the engine serves what they wrote."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.check.folders import check_adapters
from tests.flow.stack import running_stack
from tests.notebooks.execute import FOLDER, NOTEBOOKS, read

pytestmark = pytest.mark.slow

TAG = "training"
(NOTEBOOK,) = (file for file in NOTEBOOKS if file.name.startswith("05"))
STEPS = 12
"""Not enough for anything but to see it learn."""


@pytest.fixture(scope="module")
def trained() -> Iterator[dict[str, Any]]:
    """The names that the cells leave behind, executed in the folder of the notebooks with fewer steps."""
    import torch

    names: dict[str, Any] = {}
    before, state = Path.cwd(), torch.random.get_rng_state()
    os.chdir(FOLDER)
    try:
        with warnings.catch_warnings():
            for cell in read(NOTEBOOK).cells:
                if TAG in cell.metadata.get("tags", ()):
                    exec(compile(cell.source, NOTEBOOK.name, "exec"), names)
                    names |= {"STEPS": STEPS, "KEPT": (STEPS // 2, STEPS)} if "STEPS" in names else {}
        yield names
    finally:
        os.chdir(before)
        torch.random.set_rng_state(state)


def test_it_learns(trained: dict[str, Any]) -> None:
    losses = trained["losses"]
    assert len(losses) == STEPS
    assert losses[-1] < 0.6 * losses[0]


def test_only_the_letter_counts(trained: dict[str, Any]) -> None:
    """Labels of the question, and of what a row is padded with, are left out of the loss."""
    tokens, labels = trained["batch"](trained["Random"](3))
    tokenizer, ignored = trained["tokenizer"], trained["IGNORED"]
    for row, marks in zip(tokens.tolist(), labels.tolist(), strict=True):
        counted = [token for token, mark in zip(row, marks, strict=True) if mark != ignored]
        assert counted[-1] == tokenizer.eos_token_id
        assert trained["FORM"].match(tokenizer.decode(counted[:-1]))


def test_nothing_that_is_held_out_is_trained_on(trained: dict[str, Any]) -> None:
    random, held_out = trained["Random"](4), {prompt for prompt, _ in trained["held_out"]}
    assert len(held_out) == 40
    assert not held_out & {trained["lesson"](random, "train")[0] for _ in range(400)}


def test_what_was_written_would_be_served_and_names_no_folder(trained: dict[str, Any]) -> None:
    found = {each.name: each.reason for each in check_adapters(str(trained["adapters"]), "builtin:demo")}
    assert found == dict.fromkeys(["json", "letters-12", "letters-6", "pirate", "shout"])
    config = (trained["adapters"] / "letters-12" / "adapter_config.json").read_text()
    assert '"base_model_name_or_path": "demo"' in config


async def test_the_engine_serves_it_as_a_model_of_its_own(trained: dict[str, Any]) -> None:
    ask = {"prompt": "Question: What is the capital of France?\nAnswer:", "max_tokens": 8, "logprobs": 0}
    async with running_stack(num_replicas=1, adapters=str(trained["adapters"])) as stack:
        told = [
            (await stack.complete(model=model, **ask))["choices"][0]
            for model in ("demo", "demo:letters-6", "demo:letters-12")
        ]
    assert len({str(each["logprobs"]["token_logprobs"]) for each in told}) == 3
