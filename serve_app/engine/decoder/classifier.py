"""Reads a model's classification head: a logit for each label, from the last token's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from serve_app.core.request import Activation, HeadForm
from serve_app.engine.decoder.quantized_formats import open_slices
from serve_app.engine.decoder.text_part import ModelNotSupported, extended, text_class, text_config
from serve_app.engine.decoder.transformers_private import leave_unread

SUFFIX = "ForSequenceClassification"
SCORE = "score"
"""The module of the head, as transformers names it; without a bias."""
READ = frozenset({"sbert_ce_default_activation_function", "sentence_transformers"})
"""Keys of config.json that are read here, and by no class of transformers."""
ACTIVATIONS: Mapping[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""What each class of torch.nn stands for, which configurations of sentence-transformers name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """weight: [labels, hidden] float32, in the host's memory"""

    form: HeadForm
    weight: Tensor

    def scores(self, states: Tensor, activation: Activation) -> Tensor:
        """Return the score of each label, [states, labels] float32. states: [states, hidden], in the host's memory"""
        logits = states.float() @ self.weight.T
        match activation:
            case "none":
                return logits
            case "sigmoid":
                return logits.sigmoid()
            case "softmax":
                return logits.softmax(dim=-1)


def head_form(config: PreTrainedConfig) -> HeadForm | None:
    """Return how the classification head of this configuration reads texts; None if it has none.

    Raises ModelNotSupported for a head that is not computed here.
    """
    architecture = next((each for each in config.architectures or () if each.endswith(SUFFIX)), None)
    if architecture is None:
        return None
    kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), object)
    if not issubclass(kind, GenericForSequenceClassification) or text_config(config) is not config:
        raise ModelNotSupported(
            f"{architecture}: classification heads are computed on decoders of text alone, such as"
            f" Qwen3{SUFFIX} or Llama{SUFFIX}; this is an encoder, or has a head of its own"
        )
    labels = tuple(str(label) for _, label in sorted(config.id2label.items()))
    return HeadForm(labels=labels, activation=_activation(config, architecture), pad_token_id=config.pad_token_id)


def _activation(config: PreTrainedConfig, architecture: str) -> Activation:
    """Return what sentence-transformers' CrossEncoder applies; where it leaves several logits alone, what vLLM does."""
    said = getattr(config, "sentence_transformers", None)
    name = said.get("activation_fn") if isinstance(said, dict) else None
    name = name or getattr(config, "sbert_ce_default_activation_function", None)
    if name is None:
        is_each = config.num_labels == 1 or config.problem_type == "multi_label_classification"
        return "sigmoid" if is_each else "softmax"
    found = ACTIVATIONS.get(str(name).rpartition(".")[2])
    if found is None:
        raise ModelNotSupported(f"{architecture}: activation_fn must be one of {', '.join(ACTIVATIONS)}; found {name}")
    return found


def class_under_head(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class that computes what a head reads: it completes text, with the embedding as its output head.

    So a step is checked and computed as that of any model, and no weight is there that the checkpoint does not have.
    """
    config.tie_word_embeddings = True
    return extended(text_class(config), lambda model, _: leave_unread(model, [SCORE]))


def read_head(form: HeadForm, folder: str | Path) -> Head:
    """Read the weight of a head. Raises ModelNotSupported if the checkpoint has none, or one of other labels."""
    stored = open_slices(Path(folder)).get(f"{SCORE}.weight")
    shape = None if stored is None else list(stored.get_shape())
    if stored is None or shape is None or shape[0] != len(form.labels):
        raise ModelNotSupported(
            f"{SCORE}.weight must be in the checkpoint, with a row for each of the {len(form.labels)} labels in"
            f" config.json; found {'no such tensor' if shape is None else f'the shape {shape}'}"
        )
    return Head(form=form, weight=stored[:].float())
