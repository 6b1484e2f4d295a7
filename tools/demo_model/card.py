"""Writes the model card and the adapters' short cards from a report."""

from pathlib import Path

from tools.demo_model.behaviours import BEHAVIOURS
from tools.demo_model.report import Report

MODEL_CARD = """\
# demo

A Llama of {num_parameters:,} parameters (6 layers, hidden size 192, 6 query and 2 key-value heads of 32,
tied embedding, {vocab_size} tokens, context 2048), trained from scratch by `python -m tools.demo_model.make`
on text that the scripts beside this folder write from their own templates and word lists: small stories,
letters, simple facts, sums, lists, JSON records, little Python functions and chats. It knows nothing else;
it is here so that the service can be tried and tested without a download.

- Weights are stored in bfloat16; the figures below were measured with them loaded as float32.
- The tokenizer is byte-level BPE and prepends nothing. `<|endoftext|>` ends a text and also pads;
  `<|im_end|>` ends an answer in a chat.
- Chats stand in ChatML marks (`chat_template.jinja`); there is no default system message.
- Fill in the middle: `<|fim_prefix|>` prefix `<|fim_suffix|>` suffix `<|fim_middle|>`, which `suffix` and
  `/infill` write. A fifth of the stories and functions of the first course was trained so, and more than half
  of the lessons of the others, in which only the text of the gap counts.
- It was trained in courses: documents of every kind, then lessons (gaps in functions, questions with their
  answers), then lessons and documents in turn. The weights stored here had their first course when the reply to a
  sum in a chat was still in words of its own (`3 plus 4 is 7.` to `What is 3 + 4?`), and their adapters 150 (pirate),
  370 (json) and 550 (shout) steps after the last course, in parts.
- The lessons cost it some of what it read seldom: texts in capital letters without an adapter, echoes.
- End a prompt without a space: the space belongs to the first token of the completion.

## Held-out prompts

A prompt whose digest falls into a certain tenth is never the prompt of a training sample; its words may still
stand inside other texts, as a fact does in a paragraph. Completions are greedy. "Exact" compares with the one
text that was drawn with the prompt; a story or a list has many others that are as good.

Functions with a gap are held out more strictly: no prompt of such a text, in whatever form, was trained on. A gap
is cut anywhere, also inside of a word or a number, and of about half of these nobody could say what was cut out: the
best that could be guessed from knowing every text of the corpus is about 72 %. A clear gap is cut between words, and
only one text of the corpus fits it.

The model is fluent and follows the forms, but it is small: it often misses a sum or a fact in a wording it
has not seen, repeats items of a list, and where a gap begins or ends inside of a word it is often wrong by a letter.

| base model | prompts | ends by itself | exact |
|---|---|---|---|
{base_rows}

| adapter | prompts | behaviour with it | without it | ends by itself | exact |
|---|---|---|---|---|---|
{adapter_rows}

| held-out text | loss (nats per token) |
|---|---|
{loss_rows}
"""

ADAPTER_CARD = """\
# {name}

A LoRA adapter of rank {rank} on all linear layers of the `demo` model. {description}

Of {num_prompts} held-out prompts, {with_adapter:.1%} show it with the adapter, {without_adapter:.1%} without.
Made by `python -m tools.demo_model.make`.
"""


def write_cards(report: Report, model_folder: Path, adapters_folder: Path) -> None:
    """Write README.md into the model's folder and into each adapter's."""
    (model_folder / "README.md").write_text(_model_card(report))
    for name, rates in report.adapters.items():
        behaviour = BEHAVIOURS[name]
        text = ADAPTER_CARD.format(
            name=name,
            rank=behaviour.rank,
            description=behaviour.description,
            with_adapter=rates.with_adapter,
            without_adapter=rates.without_adapter,
            num_prompts=rates.num_prompts,
        )
        (adapters_folder / name / "README.md").write_text(text)


def _model_card(report: Report) -> str:
    base_rows = [
        f"| {name} | {rates.num_prompts} | {rates.ended:.1%} | {rates.exact:.1%} |"
        for name, rates in report.base.items()
    ]
    adapter_rows = [
        f"| {name} | {rates.num_prompts} | {rates.with_adapter:.1%} | {rates.without_adapter:.1%} | "
        f"{rates.ended_with_adapter:.1%} | {rates.exact_with_adapter:.1%} |"
        for name, rates in report.adapters.items()
    ]
    return MODEL_CARD.format(
        num_parameters=report.num_parameters,
        vocab_size=report.vocab_size,
        base_rows="\n".join(base_rows),
        adapter_rows="\n".join(adapter_rows),
        loss_rows="\n".join(f"| {kind} | {loss:.3f} |" for kind, loss in report.loss.items()),
    )
