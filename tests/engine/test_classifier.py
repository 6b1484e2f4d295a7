"""Which classification heads are computed, and what makes scores of their logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, LlamaConfig, ModernBertConfig, PreTrainedConfig, Qwen3Config, XLMRobertaConfig

from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.classifier import Head, head_form
from serve_app.engine.decoder.config_check import check_config
from serve_app.engine.decoder.loading import rehearse
from serve_app.engine.decoder.text_part import ModelNotSupported
from tests.families.making import save_model

ONE, TWO = {0: "LABEL_0"}, {0: "no", 1: "yes"}
CROSS = "torch.nn.modules."


def form_of(kind: type[PreTrainedConfig] = Qwen3Config, **settings: Any) -> Any:
    name = f"{kind.__name__.removesuffix('Config')}ForSequenceClassification"
    return head_form(kind(architectures=[name], **settings))


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({"id2label": ONE}, "sigmoid"),
        ({"id2label": TWO}, "softmax"),
        ({"id2label": TWO, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"id2label": ONE, "sentence_transformers": {"activation_fn": f"{CROSS}linear.Identity"}}, "none"),
        ({"id2label": ONE, "sentence_transformers": {"activation_fn": f"{CROSS}activation.Sigmoid"}}, "sigmoid"),
        ({"id2label": ONE, "sbert_ce_default_activation_function": f"{CROSS}linear.Identity"}, "none"),
        ({"id2label": TWO, "sentence_transformers": {"activation_fn": f"{CROSS}activation.Sigmoid"}}, "sigmoid"),
        ({"id2label": TWO, "sentence_transformers": {"version": "5.0"}}, "softmax"),
    ],
)
def test_a_configuration_says_what_makes_scores_of_logits(settings: dict[str, Any], activation: str) -> None:
    form = form_of(**settings, pad_token_id=7)
    assert (form.activation, form.labels) == (activation, tuple(settings["id2label"].values()))
    assert (form.pad_token_id, form.pooling, form.normalizes) == (7, "last", False)


def test_another_activation_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ModelNotSupported, match=r"one of Identity, Sigmoid, Softmax; found torch\.nn\.modules\.Tanh"):
        form_of(sentence_transformers={"activation_fn": f"{CROSS}Tanh"})


@pytest.mark.parametrize("kind", [BertConfig, XLMRobertaConfig, ModernBertConfig])
def test_encoders_are_refused_by_name(kind: type[PreTrainedConfig], tmp_path: Path) -> None:
    name = f"{kind.__name__.removesuffix('Config')}ForSequenceClassification"
    kind(architectures=[name]).save_pretrained(tmp_path)
    with pytest.raises(ModelNotSupported, match=f"{name}: classification heads are computed on decoders"):
        check_config(tmp_path)


def test_a_model_that_completes_text_has_no_head() -> None:
    assert head_form(LlamaConfig(architectures=["LlamaForCausalLM"])) is None
    assert head_form(LlamaConfig()) is None


def test_a_checkpoint_without_the_weight_is_refused_by_the_check_too(tmp_path: Path) -> None:
    save_model("llama", {}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotSupported, match="for each of the 3 labels in config"):
        rehearse(EngineConfig(name="tiny", path=str(tmp_path)))


def test_no_logit_is_too_large_or_too_small() -> None:
    head = Head(form=form_of(id2label=TWO), weight=torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    states = torch.tensor([[1000.0, -1000.0]], dtype=torch.float64)
    assert head.scores(states, "sigmoid").tolist() == [[1.0, 0.0]]
    assert head.scores(states, "softmax").tolist() == [[1.0, 0.0]]
    assert head.scores(states, "none").tolist() == [[1000.0, -1000.0]]
