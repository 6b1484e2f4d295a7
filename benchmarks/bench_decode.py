"""Decode speed of the engine beside transformers' `generate` on the same batch, interleaved in one run.

    python benchmarks/bench_decode.py --model serve_app/demo/model --dtype float32 --batches 1,8,32

`--model random-0.5b` makes a random model of Qwen2.5-0.5B's shape in memory of a temporary folder. Prints JSON:
per batch size the best and median milliseconds per step and tokens per second of both, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from serve_app.engine.config import EngineConfig
from tests.engine.harness import GREEDY, make_engine, request, sequences


def make_half_billion(folder: Path) -> None:
    """Random weights in the shape of Qwen2.5-0.5B, with a byte tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)


def engine_step_ms(engine: object, prompts: list[list[int]], steps: int) -> list[float]:
    """Milliseconds of each pure decode step."""
    for i, prompt in enumerate(prompts):
        asked = request(f"{time.monotonic_ns()}-{i}", max_tokens=steps + 1, sampling=GREEDY)
        engine.add(sequences(engine, asked, prompt))  # type: ignore[attr-defined, arg-type]
    times = []
    while engine.has_work:  # type: ignore[attr-defined]
        start = time.perf_counter()
        deltas = engine.step()  # type: ignore[attr-defined]
        if len(deltas) == len(prompts) and all(len(d.token_ids) == 1 and d.prompt is None for d in deltas):
            times.append((time.perf_counter() - start) * 1e3)
    return times


def generate_step_ms(module: torch.nn.Module, prompts: list[list[int]], steps: int) -> list[float]:
    """Milliseconds per decode step of `generate`, its prefill (a run of one token) taken off."""
    ids = torch.tensor(prompts)

    def run(tokens: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            module.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return time.perf_counter() - start

    return [(run(steps + 1) - run(1)) * 1e3 / steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="serve_app/demo/model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.model)
        if args.model == "random-0.5b":
            folder = Path(scratch)
            make_half_billion(folder)
        own = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype), local_files_only=True)
        own = own.eval()
        settings = EngineConfig(
            name="bench", path=str(folder), dtype=args.dtype, max_num_sequences=64, prefix_cache=False
        )
        engine = make_engine(settings, eos_token_ids=frozenset())  # every sequence runs to its bound, as theirs do
        vocab = engine.model.vocab_size
        report = {"model": args.model, "dtype": args.dtype, "threads": args.threads, "prompt": args.prompt}
        for batch in map(int, args.batches.split(",")):
            ours: list[float] = []
            theirs: list[float] = []
            for turn in range(args.rounds + 1):
                generator = torch.Generator().manual_seed(turn)
                prompts = torch.randint(10, vocab, (batch, args.prompt), generator=generator).tolist()
                step_times = engine_step_ms(engine, prompts, args.steps)
                their_times = generate_step_ms(own, prompts, args.steps)
                if turn:  # the first round warms up
                    ours.append(statistics.median(step_times))
                    theirs += their_times
            report[f"batch {batch}"] = {
                "engine_ms": round(statistics.median(ours), 2),
                "generate_ms": round(statistics.median(theirs), 2),
                "engine_tokens_per_s": round(batch * 1e3 / statistics.median(ours)),
                "generate_tokens_per_s": round(batch * 1e3 / statistics.median(theirs)),
                "generate/engine": round(statistics.median(theirs) / statistics.median(ours), 2),
            }
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
