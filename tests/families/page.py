"""Writes docs/models.md from the tables: `python -m tests.families.page`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.families.families import NOT_ALONE, REFUSED, REMEDIES, SERVED, Family
from tests.families.sighted import SIGHTED

REAL = Path(__file__).with_name("real.md")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Models

Which families of decoders are served. A family is transformers' `model_type`, as `config.json` names it. This page is
written from the tables in `tests/families/families.py` by `python -m tests.families.page`; a test checks that it is so.
"""
SERVED_HEAD = """
## Served

Small random models of these families, made by `tests/families/making.py`, give in float32 exactly the tokens of
transformers' `generate`: prompts of many lengths computed together, cut into chunks, continued from cached prefixes and
forked into two samples. What is named in brackets is tested besides the plain form; after "only", in its place.

"""
NOTES = """
Of a model that takes images or sounds as well, the part that computes text is served, but for those below: its towers
are neither made nor read, prompts are texts, and the reference is the whole model on the same text. Its card says so
to whoever sends an image. Other families of this kind, which are in no table here, are loaded too: the probe at the end
of loading compares their logits with transformers' own and refuses what differs.

LongRoPE (`phi3` and its like) has two sets of frequencies. transformers chooses by the longest row of each batch and
computes a text anew when it crosses the length the model was first trained at. Here the context that is served
decides, once, for every sequence: within `original_max_position_embeddings` the short ones, beyond it the long ones,
short texts included. Who serves short texts alone sets `max_model_len` to that length.

## Models that see

Images are taken by these, where the folder has an image processor (`preprocessor_config.json`) and a token for images;
without one of them, or with `images: false`, their text is served alone:

{sighted}

Tokens are those of `generate` with transformers' own processors, in float32: several images in a prompt, cut into
chunks, continued from cached prefixes, forked, beside texts. Image processors are those that need Pillow alone.
Towers are not adapted: an adapter that changes one is refused while images are served ([adapters](adapters.md)).

## Quantised checkpoints

Weights are dequantised as they are loaded, one by one, into `dtype`; they take the memory of plain ones. Numbers are
those that the format's own library gives; activations are not quantised, so results are those of the stored weights
in full. With [`weights`](operations.md#weights-in-few-bits) they stay in few bits: of the forms marked below as they
are stored, of all others rounded once more.

| `quant_method` | what is read |
|---|---|
| `fp8`, `fbgemm_fp8` | one scale, one per output, or blocks (`weight_block_size`); DeepSeek's and Qwen's, experts \
included |
| `compressed-tensors` | `float-`, `int-` and `naive-quantized` (8 bits; int8 without zero points is kept by \
`int8`); `pack-quantized` (2, 4, 8 bits; 4 in groups of 32, 64, 128 or 256 is kept by `int4`) |
| `gptq` | 2, 4 and 8 bits, formats `gptq` and `gptq_v2`, act-order included; 4 bits in such groups without \
act-order is kept by `int4` |
| `awq` | 4 bits, version `gemm`; in such groups kept by `int4` |
| `bitsandbytes` | int8, kept by `int8`; nf4 and fp4, nested or not |
| `mxfp4` | gpt-oss's experts |

A file that names no method is read by settings that one method alone has (`load_in_4bit`, `config_groups`, `w_bit` …).
Any other method, or another form of these, is refused by its name: serve the checkpoint it was made from, or save it
dequantised with the library that made it. A checkpoint that lacks a weight is refused, too.
"""
FOLDERS = """
## Folders

A folder is `config.json`, weights in safetensors and a tokenizer, as repositories of models have them. It is served
where transformers loads it with a class of its own and `trust_remote_code=False`, and refused for its architecture
alone:

- `config.json`: `auto_map` and other keys that would run code, fetch it or set the library are left out; keys that
  the architecture's class does not read change nothing. `serve_app models check` names both. A `model_type` that
  transformers does not know is read by `architectures`, unless `auto_map` names another class or sizes are in words
  of another.
- Weights: `model.safetensors`, else what `model.safetensors.index.json` names; other files are left alone.
- Tokenizer: what transformers chooses by `tokenizer_config.json`. Where that is code of the folder, its
  `tokenizer.json` is read. Without one, transformers converts `vocab.json` and `merges.txt`, `vocab.txt`,
  `tekken.json`, or `tokenizer.model` (`pip install sentencepiece`); else the error has the command that makes
  `tokenizer.json`.
- A text ends at all tokens that the tokenizer, `config.json` and `generation_config.json` name.

`serve_app models check` and `serve_app check` do what loading does, in its order, without the numbers of weights:
they give the refusals of loading, but for memory, and logits that are off.

These are folders of public models, as far as their small files are known: configuration, tokenizer's settings,
templates. Weights are random, layers few and small; what a folder lacks is of a small llama or of a tokenizer of
bytes. `equal` is to transformers: tokens to `generate` in float32, ends to all that the files name. `python -m
tests.families.real FOLDERS` makes the table.

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
