"""Trains the byte-level BPE tokenizer of the demo model and writes its files."""

import json
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tools.demo_model.behaviours import BEHAVIOURS
from tools.demo_model.corpus import KINDS, documents
from tools.demo_model.generate import load_tokenizer
from tools.demo_model.samples import draw_from_split
from tools.demo_model.tokens import (
    END_OF_TEXT,
    FIM_MIDDLE,
    FIM_PREFIX,
    FIM_SUFFIX,
    IM_END,
    IM_START,
    SPECIAL_TOKENS,
)

VOCAB_SIZE = 2048
MAX_LENGTH = 2048
NUM_DOCUMENTS = 16_000
NUM_SAMPLES_PER_BEHAVIOUR = 1_500

NAMED_TOKENS = {
    "fim_prefix_token": FIM_PREFIX,
    "fim_suffix_token": FIM_SUFFIX,
    "fim_middle_token": FIM_MIDDLE,
    "im_start_token": IM_START,
    "im_end_token": IM_END,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": MAX_LENGTH,
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "eos_token": END_OF_TEXT,
    "pad_token": END_OF_TEXT,
    "model_specific_special_tokens": NAMED_TOKENS,
    **NAMED_TOKENS,
}
CHAT_TEMPLATE = """\
{#- Each message stands between <|im_start|> and <|im_end|>, after its role. No system text is added. -#}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- elif message['content'] -%}
        {%- for part in message['content'] if part['type'] == 'text' -%}
            {{- part['text'] -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def train_tokenizer(folder: Path, *, seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on texts of the corpus and of the behaviours, and write it to `folder`.

    It prepends no token and knows all 256 bytes, so that any text comes back unchanged.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return load_tokenizer(folder)


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """Look up the id of one token."""
    return int(tokenizer.get_vocab()[token])


def _texts(seed: int) -> Iterable[str]:
    random = Random(seed)
    plain = islice(documents(random, split="train", kinds=KINDS), NUM_DOCUMENTS)
    behaving = (
        draw_from_split(behaviour.draw, random, split="train").text
        for behaviour in BEHAVIOURS.values()
        for _ in range(NUM_SAMPLES_PER_BEHAVIOUR)
    )
    return chain(plain, behaving)
