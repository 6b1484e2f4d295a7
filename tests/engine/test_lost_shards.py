"""What becomes of an engine whose workers do not come to a sum; nothing hangs, and no process is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from serve_app.core.errors import EngineFailed
from serve_app.engine.tensor_parallel.workers import Workers
from tests.engine.harness import complete, request
from tests.engine.test_shards import engine_of
from tests.families.making import save_model

pytestmark = pytest.mark.slow


@pytest.mark.law("Shards")
def test_a_follower_that_does_not_answer_is_waited_for_within_bounds(tmp_path: Path) -> None:
    save_model("llama", {}, tmp_path)
    workers = Workers(2, torch.device("cpu"), threads=1, timeout_s=5)
    [process_id] = [each.pid for each in workers._processes]
    engine = engine_of(tmp_path, {}, workers)
    engine.check()
    os.kill(process_id, signal.SIGSTOP)
    outcome = complete(engine, [(request("a"), [1, 2, 3])])["a", 0]
    assert isinstance(outcome.deltas[-1].error, EngineFailed)
    with pytest.raises(EngineFailed, match="2 shards"):
        engine.check()
    os.kill(process_id, signal.SIGCONT)
    engine.close()
    assert not is_there(process_id)


def is_there(process_id: int) -> bool:
    return Path(f"/proc/{process_id}").exists()
