"""What the sandbox matches is what this process would; no configuration takes it longer, or more, than it may.

What needs no sandbox is matched as PEFT would.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from torch import nn

from serve_app.engine.lora.matching import AdapterRefused, Matcher
from serve_app.engine.lora.sandboxed_matching import match_sandboxed
from tests.engine.conftest import DEMO
from tests.families.making import save_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def here() -> Matcher:
    return Matcher.of_folder(DEMO)


def test_it_matches_what_this_process_matches(here: Matcher) -> None:
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 12,
        "target_modules": r".*layers\.[01]\.(mlp|self_attn)\..*_proj",
        "rank_pattern": {"q_proj": 3},
        "a_field_of_tomorrow": "x",
    }
    sandboxed = Matcher.of_folder(DEMO)
    assert not sandboxed.knows(config)
    match_sandboxed(sandboxed, config)
    assert sandboxed.knows(config)
    assert asdict(sandboxed.match(config)) == asdict(here.match(config))
    assert sandboxed.match(config).notes == ("adapter_config.json: a_field_of_tomorrow is not read by PEFT's LoRA",)


def test_a_refusal_has_the_same_words(here: Matcher) -> None:
    config = {"peft_type": "LORA", "r": 8, "target_modules": ["nothing_of_this_name"]}
    with pytest.raises(AdapterRefused) as expected:
        here.match(config)
    sandboxed = Matcher.of_folder(DEMO)
    match_sandboxed(sandboxed, config)
    with pytest.raises(AdapterRefused) as refused:
        sandboxed.match(config)
    assert str(refused.value) == str(expected.value)


def test_what_the_process_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = json.loads("[" * 500 + "]" * 500)
    nested: dict[str, object] = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "runtime": deep}
    monkeypatch.setattr("serve_app.engine.lora.sandboxed_matching.MATCHING_S", 0.05)
    sandboxed = Matcher.of_folder(DEMO)
    match_sandboxed(sandboxed, nested)
    with pytest.raises(AdapterRefused, match=r"cannot be matched with the model within 60 s of a CPU, 0\.05 s"):
        sandboxed.match(nested)


OTHERWISE = {"exclude_modules": ["nothing_of_this_name"]}
"""Changes nothing, and leaves the rest to PEFT."""


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3", "gpt_neox", "cohere"])
def test_what_names_linears_alone_is_matched_as_peft_matches_it_and_at_once(family: str, tmp_path: Path) -> None:
    save_config(family, {}, tmp_path / family)
    matcher = Matcher.of_folder(tmp_path / family)
    paths = [name for name, each in matcher.shapes.named_modules() if isinstance(each, nn.Linear) and name != "lm_head"]
    ends = sorted({name.rpartition(".")[2] for name in paths})
    num_plain = 0
    for targets in [*([each] for each in ends), ends, paths, paths[:1]]:
        for more in ({}, {"use_rslora": True, "use_dora": True, "bias": "none", "layers_pattern": None}):
            config = {"peft_type": "LORA", "r": 8, "lora_alpha": 12, "target_modules": targets, **more}
            if matcher.knows(config):
                num_plain += 1
                assert asdict(matcher.match(config)) == asdict(matcher.match(config | OTHERWISE))
    assert num_plain > 8


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["q_proj", "no_proj"]},
        {"target_modules": []},
        {"target_modules": ["roj"]},
        {"rank_pattern": {"q_proj": 2}},
        {"layers_to_transform": [0]},
        {"init_lora_weights": "pissa"},
        {"modules_to_save": ["embed_tokens"]},
        {"a_field_of_tomorrow": 1},
    ],
)
def test_whatever_else_a_configuration_says_is_left_to_peft(change: dict[str, object], here: Matcher) -> None:
    plain = {"peft_type": "LORA", "r": 8, "lora_alpha": 12, "target_modules": ["q_proj"]}
    assert here.knows(plain)
    assert not here.knows(plain | change)


def test_a_rank_that_is_none_is_refused_in_the_same_words(here: Matcher) -> None:
    plain = {"peft_type": "LORA", "r": 0, "lora_alpha": 12, "target_modules": ["q_proj"]}
    reasons = []
    for config in (plain, plain | OTHERWISE):
        with pytest.raises(AdapterRefused) as refused:
            here.match(config)
        reasons.append(str(refused.value))
    assert reasons[0] == reasons[1]
    assert here.knows(plain)
