"""What every test starts from: Ray's switches are set before anything imports Ray."""

from __future__ import annotations

import os

os.environ.update(
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_worker_niceness="0",
    RAY_SERVE_LOG_TO_STDERR="0",
    OMP_WAIT_POLICY="PASSIVE",
    HF_HUB_OFFLINE="1",
)
