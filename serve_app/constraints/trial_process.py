"""The process that tries constraints: it keeps the vocabulary ready and forks for each, so that any may be ended.

Run by `trials.Trials`. What a tenant sent is looked at only in a child, which the kernel ends when its time is up or
its memory is spent, whatever it is doing then.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

from llguidance import LLTokenizer

from serve_app.constraints.compilation import compile_source
from serve_app.constraints.limits import ConstraintLimits
from serve_app.constraints.refusal import Refusal
from serve_app.constraints.vocabulary import Vocabulary
from serve_app.sandbox.child import Work, bound_memory, bound_time, send_pid


def prepare(first: tuple[Vocabulary, ConstraintLimits]) -> Work:
    """Each child takes one constraint and answers."""
    vocabulary, limits = first
    tokenizer = vocabulary.tokenizer()

    def take_one(connection: Connection) -> None:
        bound_time(cpu_s=limits.max_cpu_s, wall_s=limits.max_wall_s)
        bound_memory(limits.max_trial_bytes)
        send_pid(connection)
        job = json.loads(connection.recv_bytes())
        bound_time(cpu_s=limits.max_cpu_s, wall_s=job["wall_s"])
        connection.send_bytes(json.dumps(_answer(job, tokenizer, vocabulary)).encode())

    return take_one


def _answer(job: dict[str, Any], tokenizer: LLTokenizer, vocabulary: Vocabulary) -> dict[str, object]:
    try:
        grammar = compile_source(job["kind"], job["source"], tokenizer, dict(vocabulary.special))
    except Refusal as refusal:
        return {"refused": refusal.message, "path": refusal.path}
    return {"grammar": grammar.text, "formats": grammar.formats, "has_rules": grammar.has_rules}
