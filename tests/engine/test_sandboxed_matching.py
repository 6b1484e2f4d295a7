"""What the sandbox matches is what this process would; no configuration takes it longer, or more, than it may."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from serve_app.engine.lora.matching import AdapterRefused, Matcher
from serve_app.engine.lora.sandboxed_matching import match_sandboxed
from tests.engine.conftest import DEMO

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
