"""A recorded run, simulated with costs that were fitted just before it: throughput and first tokens within 15 %.

`recorded` holds 90 requests to one replica with 12 layers of 640 and adapters of rank 16, on one thread of a CPU, as
`python -m benchmarks.replay` measured them at the client, and the costs that `serve_app whatif fit` had written.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.engine.config import EngineConfig
from serve_app.whatif.costs import StepCosts
from serve_app.whatif.simulation import Service, recorded, simulate
from serve_app.whatif.trace import read_trace

FOLDER = Path(__file__).parent / "recorded"
CONFIG = EngineConfig(
    name="mid", path="", device="cpu", max_num_sequences=16, max_batch_tokens=512, max_model_len=4096, max_adapters=4
)
WITHIN = 0.15


def test_what_was_recorded_is_told_within_a_seventh() -> None:
    trace = read_trace(str(FOLDER / "trace.jsonl"))
    service = Service(config=CONFIG, costs=StepCosts.read(str(FOLDER / "steps.json")))
    was, told = recorded(trace), simulate(trace, service, num_replicas=1, policy="warm")
    assert (told.num_served, told.num_refused) == (90, 0)
    assert told.tokens_per_s == pytest.approx(was.tokens_per_s, rel=WITHIN)
    assert told.first_p50 == pytest.approx(was.first_p50, rel=WITHIN)
    assert told.first_p99 == pytest.approx(was.first_p99, rel=WITHIN)
