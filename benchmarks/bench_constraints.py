"""Measures what constraints cost: a compile, and the masks of a step, beside the step's sampling without any.

    python -m benchmarks.bench_constraints [--tiktoken FILE]… [--cpu]

Vocabularies are those of real tokenizers where files of ranks are given (a token's bytes in base64 on each line), and
made up otherwise. A step is what follows the forward; masks are waited for from their beginning, though in an engine
they are computed beside the forward, so that less of them is seen. Rows follow a text that satisfies the schema. Prints
the median and the 99th percentile over steps, of runs with and without constraints that take turns; with `--cpu` of the
processor time of all threads together, torch's work in one of them, for a machine that others use as well. Then the
same text is followed to its end, every token drawn or the forced ones appended: microseconds behind the forward for
each token.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import statistics
import time
from pathlib import Path

import torch
from llguidance import LLMatcher, LLTokenizer

from serve_app.constraints.compilation import build_matcher, compile_source
from serve_app.constraints.vocabulary import Masks, Matcher, Vocabulary
from serve_app.core.names import ModelRef
from serve_app.core.prompt import Prompt
from serve_app.core.request import ConstraintKind, GenerationRequest, SamplingParams
from serve_app.engine.sampling.masks import MaskComputer
from serve_app.engine.sampling.sampler import Sampler
from serve_app.engine.scheduler.sequence import Batch, Sequence, Span

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 60},
        "mail": {"type": "string", "format": "email"},
        "born": {"type": "string", "format": "date"},
        "role": {"enum": ["admin", "editor", "reader"]},
        "score": {"type": "number", "minimum": 0, "maximum": 100},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z-]+$"}, "maxItems": 8},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "mail", "born", "role", "score", "tags", "address"],
    "additionalProperties": False,
}
TEXT = (
    '{"name": "Ada Lovelace", "mail": "ada@example.org", "born": "1815-12-10", "role": "editor", "score": 99.5,'
    ' "tags": ["analytical", "engine"], "address": {"street": "12 St James\'s Square, London", "zip": "12345"}}'
)
COMPACT_TEXT = json.dumps(json.loads(TEXT), separators=(",", ":"))
GRAMMARS: dict[str, tuple[ConstraintKind, str]] = {
    "schema of eight fields": ("json_schema", json.dumps(PERSON)),
    "any JSON": ("json_schema", "{}"),
    "regex": ("regex", r"\d{4}-\d{2}-\d{2}( [A-Za-z]+){1,20}"),
}
NUM_STEPS = 60
NUM_WALKS = 5
now = time.perf_counter


def read_vocabulary(path: Path) -> Vocabulary:
    """Of a file of ranks, each with a token's bytes in base64."""
    lines = path.read_text(encoding="ascii").split("\n")
    pieces = [base64.b64decode(line.split()[0]) for line in lines if line]
    return Vocabulary(pieces=(*pieces, *[None] * 293), eos_token_ids=(len(pieces),))


def made_up(size: int) -> Vocabulary:
    """Every byte, and words with and without a blank before them."""
    draw, words = random.Random(0), {bytes([each]) for each in range(256)}
    while len(words) < size - 1:
        letters = "".join(draw.choices("etaoinshrdlucmfgypwb", k=draw.randrange(2, 9)))
        words.add(draw.choice((letters, " " + letters, letters.title(), f'"{letters}', letters + '":')).encode())
    return Vocabulary(pieces=(*sorted(words), None), eos_token_ids=(size - 1,))


def sequence(number: int, *, greedy: bool, matcher: Matcher | None) -> Sequence:
    sampling = SamplingParams(temperature=0.0) if greedy else SamplingParams(temperature=0.8, top_p=0.95, seed=number)
    request = GenerationRequest(
        request_id=str(number), model=ModelRef(base="bench"), prompt=Prompt(parts=((0,),)), sampling=sampling
    )
    return Sequence(request, [0], sample=0, max_tokens=999, detokenizer=None, matcher=matcher)  # type: ignore[arg-type]


def measure(vocabulary: Vocabulary, num_rows: int, *, greedy: bool) -> None:
    tokenizer = vocabulary.tokenizer()
    text = compile_source("json_schema", json.dumps(PERSON), tokenizer).text
    token_ids = tokenizer.greedy_tokenize(TEXT)
    master, computer, sampler = build_matcher(text, tokenizer), MaskComputer(), Sampler()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, len(vocabulary), generator=generator) * 3
    seconds: dict[str, list[float]] = {"free": [], "held": [], "masks alone": [], "advance": []}
    matchers = [Matcher(master.deep_copy(), num_words=vocabulary.num_words) for _ in range(num_rows)]
    # each row is at another place of the text, so that a step has masks of every kind
    places = [row * 5 % len(token_ids) for row in range(num_rows)]
    for matcher, place in zip(matchers, places, strict=True):
        for token_id in token_ids[:place]:
            matcher.advance(token_id)
    for _ in range(NUM_STEPS):
        for name, own in (("free", [None] * num_rows), ("held", matchers)):
            spans = [
                Span(sequence(row, greedy=greedy, matcher=own[row]), 0, 1, samples=True) for row in range(num_rows)
            ]
            batch = Batch(tuple(spans))
            started = now()
            masks = computer.begin(batch)
            if masks is not None:
                masks.wait()
                seconds["masks alone"].append(now() - started)
            sampler.sample(rows, batch, masks)
            seconds[name].append(now() - started)
        started = now()
        for row, matcher in enumerate(matchers):
            if places[row] == len(token_ids):
                places[row], matchers[row] = 0, Matcher(master.deep_copy(), num_words=vocabulary.num_words)
                continue
            matcher.advance(token_ids[places[row]])
            assert matcher.failure is None, matcher.failure
            places[row] += 1
        seconds["advance"].append(now() - started)
    told = ", ".join(f"{name} {ms(each, 0.5)} (p99 {ms(each, 0.99)})" for name, each in seconds.items())
    kind = "greedy" if greedy else "top_p 0.95"
    print(f"{len(vocabulary):>7} tokens, {num_rows:>2} rows, {kind:<10}: {told} ms", flush=True)


def path_of(master: LLMatcher, tokenizer: LLTokenizer, text: str) -> list[tuple[int, bool]]:
    """The tokens of a text under its constraint, and which of them were forced."""
    follower, rest, path = Matcher(master.deep_copy(), num_words=1), text.encode(), []
    while rest:
        forced = follower.forced
        token_id = tokenizer.tokenize_bytes(rest)[0] if forced is None else forced
        piece = tokenizer.decode_bytes([token_id])
        assert rest.startswith(piece), (piece, rest)
        follower.advance(token_id)
        assert follower.failure is None, follower.failure
        path.append((token_id, forced is not None))
        rest = rest[len(piece) :]
    return path


def measure_forcing(vocabulary: Vocabulary, num_rows: int, *, kind: ConstraintKind, text: str) -> None:
    """The same texts to their ends, rows one token apart: every token drawn, or the forced ones appended unseen."""
    tokenizer = vocabulary.tokenizer()
    master = build_matcher(compile_source(kind, json.dumps(PERSON), tokenizer).text, tokenizer)
    path = path_of(master, tokenizer, text)
    logits = torch.randn(num_rows, len(vocabulary), generator=torch.Generator().manual_seed(0)) * 3
    seconds: dict[str, list[float]] = {"free": [], "one by one": [], "forcing": []}
    num_steps = dict.fromkeys(seconds, 0)
    for _ in range(NUM_WALKS):
        for name, found in seconds.items():
            took, num_steps[name] = walk(master, vocabulary, path, logits, name=name)
            found.append(took)
    num_tokens, num_forced = len(path) * num_rows, sum(forced for _, forced in path)
    per_token = {name: statistics.median(found) / num_tokens * 1e6 for name, found in seconds.items()}
    told = ", ".join(f"{name} {each:.0f} in {num_steps[name]} steps" for name, each in per_token.items())
    print(
        f"{len(vocabulary):>7} tokens, {num_rows:>2} rows, {kind}, {num_forced} of {len(path)} forced: µs a token"
        f" {told}",
        flush=True,
    )


def walk(
    master: LLMatcher, vocabulary: Vocabulary, path: list[tuple[int, bool]], logits: torch.Tensor, *, name: str
) -> tuple[float, int]:
    """Seconds behind the forwards of all rows' texts, and steps. In `forcing` a forced token is not drawn."""
    computer, sampler, num_words = MaskComputer(), Sampler(), vocabulary.num_words
    matchers = [Matcher(master.deep_copy(), num_words=num_words) for _ in logits]
    places = [-row for row in range(len(logits))]  # below zero a row has not begun
    seconds, num_steps = 0.0, 0
    while min(places) < len(path):
        rows = [row for row, place in enumerate(places) if 0 <= place < len(path)]
        spans = [
            Span(sequence(row, greedy=True, matcher=None if name == "free" else matchers[row]), 0, 1, samples=True)
            for row in rows
        ]
        batch = Batch(tuple(spans))
        chosen = logits[: len(rows)]
        started = now()
        masks = computer.begin(batch)
        if masks is not None:
            masks.wait()
        sampler.sample(chosen, batch, masks)
        for row in rows:
            places[row] += 1
            if name != "free":
                matchers[row].advance(path[places[row] - 1][0])
            while name == "forcing" and (token_id := matchers[row].forced) is not None:
                matchers[row].advance(token_id)
                places[row] += 1
        seconds += now() - started
        num_steps += 1
        places = [place + 1 if place < 0 else place for place in places]
    return seconds, num_steps


def ms(seconds: list[float], quantile: float) -> str:
    return f"{sorted(seconds)[int(quantile * (len(seconds) - 1))] * 1e3:.2f}"


def measure_compiling(vocabulary: Vocabulary) -> None:
    started = now()
    tokenizer = vocabulary.tokenizer()
    print(f"{len(vocabulary):>7} tokens: vocabulary {now() - started:.2f} s", end="")
    for name, (kind, source) in GRAMMARS.items():
        found = []
        for _ in range(9):
            started = now()
            grammar = compile_source(kind, source, tokenizer)
            found.append(now() - started)
        master = build_matcher(grammar.text, tokenizer)
        started = now()
        copy = master.deep_copy()
        copied = now() - started
        room = torch.zeros(vocabulary.num_words, dtype=torch.int32)  # held, as its address is all that is given
        Masks().fill([Matcher(copy, num_words=vocabulary.num_words)], room.data_ptr())
        print(f", {name} {statistics.median(found) * 1e3:.1f} ms (copy {copied * 1e6:.0f} µs)", end="")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiktoken", type=Path, action="append", default=[], help="a file of ranks")
    parser.add_argument("--cpu", action="store_true", help="processor time, in place of the clock's")
    arguments = parser.parse_args()
    if arguments.cpu:
        global now
        now = time.process_time
        torch.set_num_threads(1)
    vocabularies = [read_vocabulary(path) for path in arguments.tiktoken] or [made_up(32_000), made_up(152_000)]
    for vocabulary in vocabularies:
        measure_compiling(vocabulary)
        for num_rows in (1, 32):
            for greedy in (True, False):
                measure(vocabulary, num_rows, greedy=greedy)
            measure_forcing(vocabulary, num_rows, kind="json_schema", text=TEXT)
            measure_forcing(vocabulary, num_rows, kind="compact_json", text=COMPACT_TEXT)


if __name__ == "__main__":
    main()
