"""Makes a small random model that sees, of Qwen2-VL's kind, with a vocabulary of a usual size."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

from tests.families.making import byte_tokenizer
from tests.families.sighted import QWEN2_VL, save_sighted

PIXELS_OF_ROW = 28 * 28
NUM_ROWS = 1280
"""Of the largest image, as Qwen2-VL itself has it."""
TEXT = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64,
    "max_position_embeddings": 8192, "layer_types": ["full_attention"] * 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
}  # fmt: skip
VISION = {**QWEN2_VL.vision, "embed_dim": 256, "hidden_size": 256, "depth": 6, "num_heads": 4}


def make_sighted(folder: Path, num_words: int) -> None:
    """Every image is cut to so many rows at most, which take the tower as long as a prompt of thousands of tokens."""
    kind = replace(
        QWEN2_VL,
        text=TEXT,
        vision=VISION,
        processor=lambda: Qwen2VLImageProcessorPil(
            size={"shortest_edge": 4 * PIXELS_OF_ROW, "longest_edge": NUM_ROWS * PIXELS_OF_ROW}
        ),
    )
    save_sighted(kind, folder, base=worded(num_words))


def worded(size: int) -> PreTrainedTokenizerFast:
    """Bytes, and words that no text is cut into but a constraint has to look at."""
    tokenizer, draw = byte_tokenizer(), random.Random(0)
    words: set[str] = set()
    while len(words) < size:
        letters = "".join(draw.choices("etaoinshrdlucmfgypwb", k=draw.randrange(4, 9)))
        words.add(draw.choice((letters, letters.title(), f'"{letters}', letters + '":')))
    tokenizer.add_tokens(sorted(words))
    return tokenizer
