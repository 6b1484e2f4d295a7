"""The families whose decoder is the loop's, and what of each no module of theirs says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """norm_offset: what is added to the weights of norms"""

    norm_offset: float = 0.0


PLAIN = Family()
GEMMA = Family(norm_offset=1.0)

FAMILIES: Mapping[str, Family] = {
    "cwm": PLAIN,
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "granite": PLAIN,
    "iquestcoder": PLAIN,
    "llama": PLAIN,
    "ministral": PLAIN,
    "mistral": PLAIN,
    "olmo": PLAIN,
    "olmo2": PLAIN,
    "olmo3": PLAIN,
    "phi3": PLAIN,
    "qwen2": PLAIN,
    "qwen3": PLAIN,
    "seed_oss": PLAIN,
    "smollm3": PLAIN,
}
"""By the `model_type` of the part for text. The loop is tried beside the model itself when it is loaded, and serves
where the logits are the same; here is which are tried, since no trial is long enough for all that a family may do."""
