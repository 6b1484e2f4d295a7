"""LongRoPE: short or long frequencies, settled by the context that is served, whoever is computed beside whom."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.engine.harness import complete, config, make_engine, request
from tests.families.families import LONGROPE, STRETCHED, Family, family
from tests.families.making import NUM_BYTES
from tests.families.test_parity import MAX_TOKENS, generate

pytestmark = pytest.mark.slow

PHI = family("phi3", "rope longrope beyond", rope_parameters=LONGROPE, **STRETCHED)
ORIGINAL = STRETCHED["original_max_position_embeddings"]


def prompts(*lengths: int) -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(NUM_BYTES) for _ in range(length)] for length in lengths]


def served(folder: Path, asked: list[list[int]], **limits: object) -> list[list[int]]:
    engine = make_engine(config(folder, **limits))
    outcomes = complete(engine, [(request(str(i), max_tokens=MAX_TOKENS), ids) for i, ids in enumerate(asked)])
    return [outcomes[str(i), 0].token_ids for i in range(len(asked))]


def test_a_context_within_the_original_length_has_the_short_frequencies(
    model_folder: Callable[[Family], Path],
) -> None:
    folder = model_folder(PHI)
    own = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="float32").eval()
    asked = prompts(1, 20, ORIGINAL - MAX_TOKENS)
    assert served(folder, asked, max_model_len=ORIGINAL) == [generate(own, ids) for ids in asked]


def test_a_longer_context_has_the_long_frequencies_beyond_the_original_length(
    model_folder: Callable[[Family], Path],
) -> None:
    folder = model_folder(PHI)
    own = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="float32").eval()
    asked = prompts(ORIGINAL + 1, 100, 200)
    assert served(folder, asked) == [generate(own, ids) for ids in asked]


@pytest.mark.parametrize("beside", [(), (200,)])
def test_a_longer_context_has_the_long_frequencies_for_short_sequences_too(
    beside: tuple[int, ...], model_folder: Callable[[Family], Path]
) -> None:
    folder = model_folder(PHI)
    own = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="float32").eval()
    rotary = own.model.rotary_emb
    with_short = generate(own, prompts(40)[0])
    generate(own, prompts(ORIGINAL + 1)[0])  # the reference computes the long ones when it first needs them
    rotary.original_inv_freq.copy_(rotary.long_inv_freq)
    expected = generate(own, prompts(40)[0])
    assert expected != with_short, "nothing tells the frequencies apart"
    assert served(folder, prompts(40, *beside))[0] == expected


def test_a_prefix_is_continued_across_the_original_length(model_folder: Callable[[Family], Path]) -> None:
    folder = model_folder(PHI)
    own = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="float32").eval()
    [whole] = prompts(ORIGINAL + 30)
    engine = make_engine(config(folder))
    complete(engine, [(request("first", max_tokens=1), whole[: ORIGINAL - 10])])
    outcome = complete(engine, [(request("second", max_tokens=MAX_TOKENS), whole)])["second", 0]
    report = outcome.deltas[0].prompt
    assert report is not None
    assert report.num_cached_tokens > 0
    assert outcome.token_ids == generate(own, whole)
