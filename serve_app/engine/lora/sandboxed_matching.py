"""Matches an adapter's configuration with a model in a sandboxed process: time and memory are bounded.

PEFT matches in Python, for as long as the configuration makes it, and would hold the engine's thread up meanwhile.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from serve_app.core.machine import command, give_way, variables
from serve_app.engine.lora.matching import AdapterRefused, Matched, Matcher, Target
from serve_app.sandbox.child import bound_memory, bound_time

logger = logging.getLogger(__name__)

NICENESS = 10
MATCHING_S = 600.0
"""On the clock, libraries included: this process gives way, so a busy machine takes long."""
MATCHING_CPU_S = 60.0
"""Of a processor, libraries not included."""
MATCHING_BYTES = 4 << 30
"""Beyond what libraries have taken."""


def match_sandboxed(matcher: Matcher, config: Mapping[str, Any]) -> None:
    """Have a matcher know a configuration, whatever becomes of it; blocks, for some seconds if it is new.

    config: an adapter_config.json
    """
    if not matcher.knows(config):
        matcher.learn(config, _matched(matcher.folder, config, sees=matcher.sees))


def _matched(folder: Path, config: Mapping[str, Any], *, sees: bool) -> Matched | AdapterRefused:
    job = json.dumps({"folder": str(folder), "sees": sees, "config": dict(config)})
    try:
        done = subprocess.run(
            command(__name__), input=job.encode(), capture_output=True, timeout=MATCHING_S, env=variables()
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError):
        answer = None
    if answer is None:
        return AdapterRefused(
            f"adapter_config.json: it cannot be matched with the model within {MATCHING_CPU_S:g} s of a CPU,"
            f" {MATCHING_S:g} s and {MATCHING_BYTES >> 30} GiB; name the modules that it changes, without expressions"
        )
    if "refusal" in answer:
        return AdapterRefused(answer["refusal"])
    targets = tuple(Target(**each) for each in answer["targets"])
    return Matched(targets=targets, use_dora=answer["use_dora"], notes=tuple(answer["notes"]))


def main() -> None:
    """Read a job from standard input, and write what was matched, or why it is refused."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print
    give_way(NICENESS)
    job = json.load(sys.stdin)
    matcher = Matcher.of_folder(Path(job["folder"]), sees=job["sees"])
    bound_time(cpu_s=MATCHING_CPU_S, wall_s=MATCHING_S)
    if sys.platform == "linux":
        bound_memory(MATCHING_BYTES)
    try:
        answer = asdict(matcher.match(job["config"]))
    except AdapterRefused as error:
        answer = {"refusal": str(error)}
    with answers:
        json.dump(answer, answers)


if __name__ == "__main__":
    main()
