"""Checks the stored demo model and its adapters as they are loaded, and the corpus they were trained on."""

import json
import os
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from peft import PeftModel
from transformers import PreTrainedTokenizerFast

from tools.demo_model.behaviours import BEHAVIOURS
from tools.demo_model.chats import chat_prompt
from tools.demo_model.corpus import KINDS, LONG_KINDS, documents, fim_sample
from tools.demo_model.functions import draw_module
from tools.demo_model.generate import complete, load_model, load_tokenizer
from tools.demo_model.report import held_out_samples
from tools.demo_model.samples import draw_from_split, split_of
from tools.demo_model.tokens import END_OF_TEXT, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX, SPECIAL_TOKENS

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "serve_app" / "demo" / "model"
ADAPTERS = REPOSITORY / "adapters" / "demo"
REPORT = REPOSITORY / "tools" / "demo_model" / "report.json"

MAX_FOLDER_BYTES = 8 * 1024 * 1024
NUM_PROMPTS = 8
MIN_SHOWN = 7


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(MODEL)


@pytest.fixture(scope="module")
def adapted() -> Any:
    first, *rest = BEHAVIOURS
    adapted = PeftModel.from_pretrained(load_model(MODEL), str(ADAPTERS / first), adapter_name=first)
    for name in rest:
        adapted.load_adapter(str(ADAPTERS / name), adapter_name=name)
    return adapted.eval()


def test_the_folder_stays_small() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= MAX_FOLDER_BYTES


def test_the_shape_suits_paged_attention_and_long_prompts(model: Any) -> None:
    assert model.config.model_type == "llama"
    assert model.config.max_position_embeddings >= 1024
    assert model.config.head_dim >= 32


def test_every_token_has_an_embedding_and_none_is_left_over(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_a_special_token_is_one_token_and_is_skipped_on_request(tokenizer: PreTrainedTokenizerFast, token: str) -> None:
    tokens = tokenizer.encode(f"a{token}b")
    assert len(tokens) == 3
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "ab"


def test_the_fim_tokens_are_found_by_their_names(tokenizer: PreTrainedTokenizerFast) -> None:
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    names = {"fim_prefix_token": FIM_PREFIX, "fim_suffix_token": FIM_SUFFIX, "fim_middle_token": FIM_MIDDLE}
    assert names.items() <= config["model_specific_special_tokens"].items()
    assert {name: getattr(tokenizer, name) for name in names} == names


def test_nothing_is_put_before_a_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)
    assert len(tokenizer.encode("a")) == 1


@pytest.mark.parametrize("seed", range(5))
def test_any_unicode_text_comes_back_from_its_tokens(tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    random = Random(seed)
    points = [random.choice((random.randrange(0xD800), random.randrange(0xE000, 0x110000))) for _ in range(300)]
    text = "  café 日本 😀\n\t" + "".join(map(chr, points)) + "  "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_writes_the_marks_of_the_training_chats(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    for content in ("Hello", parts):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        assert text == chat_prompt("Hello")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("The capital of France is", " Paris."),
        ("Question: What does a cow say?\nAnswer:", " Moo"),
        ('def add_three(number):\n    """Add 3 to a number."""', "\n    return number + 3\n"),
        (chat_prompt("What is the capital of Japan?"), "The capital of Japan is Tokyo."),
        (f"{FIM_PREFIX}def largest(values):\n{FIM_SUFFIX}\n{FIM_MIDDLE}", "    return max(values)"),
    ],
)
def test_a_known_prompt_is_completed_and_ends(
    model: Any, tokenizer: PreTrainedTokenizerFast, prompt: str, expected: str
) -> None:
    (completion,) = complete(model, tokenizer, [prompt], max_new_tokens=40)
    assert completion.text == expected
    assert completion.is_ended


def test_a_story_ends_by_itself(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    (completion,) = complete(model, tokenizer, ["Once upon a time, there was a brave fox named Mia."])
    assert completion.is_ended
    assert "Mia" in completion.text


@pytest.mark.slow
@pytest.mark.parametrize("name", BEHAVIOURS)
def test_an_adapter_shows_its_behaviour_and_the_base_does_not(
    adapted: Any, tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    behaviour = BEHAVIOURS[name]
    prompts = [sample.prompt for sample in held_out_samples(behaviour.draw, NUM_PROMPTS)]
    adapted.set_adapter(name)
    shown = [behaviour.is_shown(completion.text) for completion in complete(adapted, tokenizer, prompts)]
    with adapted.disable_adapter():
        shown_by_base = [behaviour.is_shown(completion.text) for completion in complete(adapted, tokenizer, prompts)]
    assert sum(shown) >= MIN_SHOWN
    assert sum(shown_by_base) <= NUM_PROMPTS - MIN_SHOWN


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_an_adapter_names_its_base_and_no_place_on_a_machine(name: str) -> None:
    config = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "demo"
    assert config["peft_type"] == "LORA"
    assert not any(isinstance(value, str) and "/" in value for value in config.values())


def test_the_report_holds_enough_prompts_and_reaches_its_aims() -> None:
    report = json.loads(REPORT.read_text())
    assert set(report["adapters"]) == set(BEHAVIOURS)
    for rates in report["adapters"].values():
        assert rates["num_prompts"] >= 100
        assert rates["with_adapter"] >= 0.95
        assert rates["without_adapter"] <= 0.05


@pytest.mark.parametrize("kinds", [KINDS, LONG_KINDS], ids=["short", "long"])
def test_the_corpus_is_the_same_under_the_same_seed(kinds: dict[Any, int]) -> None:
    first, second, other = (list(islice(documents(Random(seed), split="train", kinds=kinds), 50)) for seed in (7, 7, 8))
    assert first == second
    assert first != other


@pytest.mark.parametrize("draw", [*KINDS, *(behaviour.draw for behaviour in BEHAVIOURS.values())])
def test_no_prompt_is_both_trained_on_and_held_out(draw: Any) -> None:
    random = Random(3)
    trained = {draw_from_split(draw, random, split="train").prompt for _ in range(300)}
    held_out = {draw_from_split(draw, random, split="held_out").prompt for _ in range(30)}
    assert not trained & held_out
    assert {split_of(prompt) for prompt in held_out} == {"held_out"}


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_of_a_fim_sample_make_up_its_text(seed: int) -> None:
    random = Random(seed)
    text = draw_module(random).text
    sample = fim_sample(text, random)
    prefix, suffix = sample.prompt.removeprefix(FIM_PREFIX).removesuffix(FIM_MIDDLE).split(FIM_SUFFIX)
    assert prefix + sample.completion.removesuffix(END_OF_TEXT) + suffix == text
