"""Graphs over Triton's kernels, adapters included: texts are those of steps that are launched kernel by kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.adapter_files import save_adapter
from tests.engine.harness import complete, config, make_engine, request
from tests.engine.test_graphs import Recorded, graphs_of, tokens

pytest.importorskip("triton", reason="its kernels can be neither compiled nor interpreted")

pytestmark = pytest.mark.slow

TARGETS = ("q_proj", "down_proj")


def test_rows_with_adapters_are_of_graphs_which_are_recorded_before_requests(
    tmp_path: Path, random_models: Path, device: torch.device
) -> None:
    base = random_models / "llama"
    module = AutoModelForCausalLM.from_pretrained(base, local_files_only=True)
    folders = {
        name: save_adapter(tmp_path / name, module, rank=rank, seed=number, alpha=8 * rank, targets=TARGETS)
        for number, (name, rank) in enumerate((("a", 4), ("b", 7), ("c", 20)))
    }
    settings = config(base, device=device.type, kernels="triton", max_num_sequences=4)
    plain, own = make_engine(settings, folders), make_engine(settings, folders)
    recorded = Recorded()
    own._runner.record_steps(recorded, num_places=4)
    first = [(request(f"{each}", max_tokens=3, adapter=each), [41] * 3) for each in ("a", None)]
    assert tokens(complete(own, first)) == tokens(complete(plain, first))
    graphs = graphs_of(own)
    assert (2, (8, 32)) in graphs._graphs
    before = graphs.num_captured
    second = [(request(f"{each}", max_tokens=5, adapter=each), [42] * 3) for each in ("a", "b", "c", None)]
    replayed = sum(recorded.num_replayed.values())
    expected = tokens(complete(plain, second))
    assert len({str(ids) for ids, _ in expected.values()}) == 4, (
        "each adapter is strong enough to be told from the others"
    )
    assert tokens(complete(own, second)) == expected
    assert (4, (8, 32)) in graphs._graphs
    assert graphs.num_captured == before
    assert sum(recorded.num_replayed.values()) > replayed
    mixed = [(request("mixed", max_tokens=3, mix={"a": 0.5, "b": 0.7}), [43] * 3)]
    replayed = sum(recorded.num_replayed.values())
    assert tokens(complete(own, mixed)) == tokens(complete(plain, mixed))
    assert sum(recorded.num_replayed.values()) == replayed, "of several adapters a row is computed as ever"
