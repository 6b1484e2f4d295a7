"""Writes docs/models.md from the tables: `python -m tests.families.page`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.families.families import NOT_ALONE, REFUSED, REMEDIES, SERVED, Family
from tests.families.sighted import SIGHTED

REAL = Path(__file__).with_name("real.md")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Models

Which families of decoders are served. A family is transformers' `model_type`, as `config.json` names it. `python -m
tests.families.page` writes this page from the tables in `tests/families/families.py`. A test compares the two.
"""
SERVED_HEAD = """
## Served

`tests/families/making.py` makes a small random model of each family here. In float32 each gives exactly the tokens of
transformers' `generate`. The tests compute prompts of many lengths together. They cut prompts into chunks, continue
from cached prefixes, and fork a prompt into two samples. Brackets name variants that are tested besides the plain form.
After "only", they are tested in its place.

"""
NOTES = """
If a model takes images or sounds as well, its text part is served; [Models that see](#models-that-see) lists the
exceptions. The engine neither builds nor reads the other encoders, and prompts are texts. The tests compare with the
whole model on the same text. If a client sends an image to such a model, the router refuses it.

Multimodal families that no table names are loaded too. At the end of loading a check compares their logits with
transformers' own. If they differ, loading fails.

LongRoPE (`phi3` and similar families) has two sets of frequencies. transformers chooses one by the longest row of a
batch. If a text grows beyond the length of the first training, transformers computes it anew. Here the served context
length decides, once, for every sequence. If `max_model_len` is at most `original_max_position_embeddings`, the short
set is used. Otherwise the long set is used, for short texts too. If you serve short texts alone, set `max_model_len` to
that length.

## Models that see

These families take images. The folder needs an image processor (`preprocessor_config.json`) and an image token.
Without one of them, or with `images: false`, the text part alone is served.

{sighted}

In float32, tokens equal those of `generate` with transformers' own processors. The tests use several images in a
prompt, chunks, cached prefixes, forks, and texts beside images. Only image processors that need nothing but Pillow are
used. Adapters do not change vision encoders. While images are served, an adapter that would change one is refused
([adapters](adapters.md)).

## Classification heads

A checkpoint whose `architectures` end in `ForSequenceClassification` has a head in the place of the vocabulary's. It
answers [`/v1/rerank`, `/v1/score` and `/v1/classify`](contract.md#rerank-score-and-classify), and completes no text.
Served are the decoders above whose class in transformers has one linear named `score` over the last token, such as
`Qwen3ForSequenceClassification` and `LlamaForSequenceClassification`. Scores are those of
`AutoModelForSequenceClassification`, and of sentence-transformers' `CrossEncoder`. Encoders (`bert`, `xlm-roberta`,
`modernbert`) are refused by name: every token of theirs reads the whole text.

`config.json` says what makes scores of logits: the `activation_fn` of `sentence_transformers`, which is `Sigmoid`,
`Softmax` or `Identity`. Without it one label has the sigmoid, several have the softmax. With
a `problem_type` of `multi_label_classification` each label has the sigmoid. `pad_token_id` is not read at a text's end.

## Quantised checkpoints

Loading dequantises weights one by one into `dtype`. They then take as much memory as plain weights. The numbers are
those of the format's own library. Activations are not quantised, so results are those of the stored weights in full.
With [`weights`](operations.md#weights-in-few-bits) they stay in few bits. Forms that the table marks as kept stay as
they are stored. All others are rounded once more.

| `quant_method` | what is read |
|---|---|
| `fp8`, `fbgemm_fp8` | one scale, one per output, or blocks (`weight_block_size`). DeepSeek's and Qwen's, experts \
included |
| `compressed-tensors` | `float-`, `int-` and `naive-quantized` (8 bits; int8 without zero points is kept by \
`int8`). `pack-quantized` (2, 4, 8 bits; 4 in groups of 32, 64, 128 or 256 is kept by `int4`) |
| `gptq` | 2, 4 and 8 bits, formats `gptq` and `gptq_v2`, act-order included. 4 bits in such groups without \
act-order is kept by `int4` |
| `awq` | 4 bits, version `gemm`; in such groups kept by `int4` |
| `bitsandbytes` | int8, kept by `int8`; nf4 and fp4, nested or not |
| `mxfp4` | gpt-oss's experts |

If `config.json` names no method, the settings decide: some occur in one method alone (`load_in_4bit`, `config_groups`,
`w_bit` …). Loading refuses any other method or form by its name. Then serve the checkpoint that it was made from, or
save it dequantised with the library that made it. Loading also refuses a checkpoint that lacks a weight.
"""
FOLDERS = """
## Folders

A folder holds `config.json`, weights in safetensors and a tokenizer, as model repositories do. It is served if
transformers loads it with a class of its own and `trust_remote_code=False`. What else is in the
folder is no reason to refuse it.

- **`config.json`**: the service leaves out `auto_map` and other keys that would run code, fetch code or configure the
  library. Keys that the architecture's class does not read change nothing. `serve_app models check` names both. If
  transformers does not know the `model_type`, `architectures` decides. That does not hold if `auto_map` names another
  class, or if sizes have another family's names.
- **Weights**: `model.safetensors`, else the files that `model.safetensors.index.json` names. Other files are not read.
- **Tokenizer**: the one that transformers chooses by `tokenizer_config.json`. If that is code in the folder,
  `tokenizer.json` is read instead. Without that file, transformers converts `vocab.json` and `merges.txt`, `vocab.txt`,
  `tekken.json`, or `tokenizer.model` (`pip install sentencepiece`). If none is there, the error shows the command that
  makes `tokenizer.json`.
- **End of text**: a text ends at every token that the tokenizer, `config.json` or `generation_config.json` names as an
  end.

`serve_app models check` and `serve_app check` repeat the checks of loading in the same order, but read no weights. They
give the same refusals, except for too little memory and for logits that differ.

The table lists folders of public models, as far as their small files are known: configuration, tokenizer settings,
templates. Weights are random; layers are few and small. A missing file is taken from a small llama or a byte tokenizer.
`equal` compares with transformers: tokens with `generate` in float32, ends with all that the files name.
`python -m tests.families.real FOLDERS` writes the table.

"""
REFUSED_HEAD = """
## Refused

Loading ends with `ModelNotSupported` and this reason.

"""


def render() -> str:
    """The page's text."""
    reasons: dict[str, list[Family]] = {}
    for refusal in REFUSED:
        reasons.setdefault(refusal.reason, []).append(refusal.family)
    return "".join(
        [
            HEAD,
            SERVED_HEAD,
            *(f"- {line}\n" for line in gather(SERVED)),
            NOTES.replace("{sighted}\n", "".join(f"- {line}\n" for line in gather(SIGHTED))),
            FOLDERS,
            REAL.read_text(encoding="utf-8"),
            REFUSED_HEAD,
            *table(reasons),
            *(f"\n`{name}` is no model by itself: it {why}.\n" for name, why in NOT_ALONE.items()),
        ]
    )


def gather(families: Iterable[Family]) -> list[str]:
    """One line per name, its variants in brackets."""
    variants: dict[str, list[str]] = {}
    for family in families:
        variants.setdefault(family.name, []).append(family.variant)
    return [f"`{name}`{_brackets(listed)}" for name, listed in sorted(variants.items())]


def _brackets(variants: list[str]) -> str:
    named = ", ".join(filter(None, variants))
    if not named:
        return ""
    return f" ({named})" if "" in variants else f" (only {named})"


def table(rows: dict[str, list[Family]]) -> list[str]:
    """Reasons, what would help, and families."""
    lines = ["| reason | families | what would help |\n", "|---|---|---|\n"]
    return lines + [f"| {name} | {', '.join(gather(rows[name]))} | {REMEDIES[name]} |\n" for name in sorted(rows)]


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
