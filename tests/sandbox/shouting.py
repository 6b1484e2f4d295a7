"""Work for a sandbox: children shout what they are given, or loop, grow, or wait and tell their niceness."""

from __future__ import annotations

import json
import os
import time
from multiprocessing.connection import Connection

from serve_app.sandbox.child import Work, bound_memory, bound_time, take_job


def prepare(mark: str) -> Work:
    def shout(connection: Connection) -> None:
        bound_time(cpu_s=0.2, wall_s=5)
        bound_memory(16 << 20)
        text = take_job(connection).decode()
        while text == "loop":
            pass
        if text == "wait":
            time.sleep(0.3)
            text = str(os.getpriority(os.PRIO_PROCESS, 0))
        held = bytearray(64 << 20) if text == "grow" else b""
        answer = f"{text.upper()}{mark}{len(held) or ''}"
        connection.send_bytes(json.dumps({"answer": answer}).encode())

    return shout


def give_up(_: object) -> Work:
    raise SystemExit
