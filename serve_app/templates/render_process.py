"""The process that renders: it keeps the compiled template and forks for those who ask, so that any may be ended.

Run by `renderer.Renderer`. A template is looked at only where the kernel ends what takes too
long or too much, whatever it is doing then: first of all when it is compiled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import jinja2

from serve_app.sandbox.child import bound_memory, bound_time, send_pid
from serve_app.templates.messages import Shown
from serve_app.templates.rendering import Refused, Templates, Work

COME = b"come"
MAX_JOBS = 1000
"""Of one child, so that whatever it gathers is let go of."""


def prepare(work: Work) -> Callable[[Connection], None]:
    """Each child takes conversations one after the other, answers each, and ends with the other side.

    Each is told to have come before it is looked at: what is lost behind that was lost to it.
    """
    bound_memory(work.limits.max_bytes)  # before anything is compiled, which computes what is constant
    templates = _compiled(work)

    def take_many(connection: Connection) -> None:
        for _ in range(MAX_JOBS):
            send_pid(connection)
            received = connection.recv_bytes()
            connection.send_bytes(COME)
            bound_time(cpu_s=work.limits.max_cpu_s, wall_s=work.limits.max_wall_s)
            connection.send_bytes(_answer(json.loads(received), templates))
            bound_time(cpu_s=0, wall_s=0)

    return take_many


def _compiled(work: Work) -> Templates | Refused:
    """The templates, once a child of ours has seen that compiling them ends well; or why there are none."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        bound_time(cpu_s=work.limits.max_cpu_s, wall_s=work.limits.max_wall_s)
        with suppress(BaseException):
            _try_to_compile(work, writing)
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as told:
        found = [json.loads(line) for line in told]
    os.waitpid(child, 0)
    if not found or "failure" in found[0]:
        return Refused(found[0]["failure"] if found else "it takes too much time or memory to compile")
    templates = Templates(work)
    if len(found) > 1:  # else what it shows cannot be found out
        one, other = found[1]["shown"]
        templates.shown = Shown(**one), Shown(**other)
    return templates


def _try_to_compile(work: Work, writing: int) -> None:
    def tell(**found: object) -> None:
        os.write(writing, json.dumps(found).encode() + b"\n")

    try:
        templates = Templates(work)
    except jinja2.TemplateSyntaxError as error:
        tell(failure=f"it cannot be compiled: {error.message} at line {error.lineno}"[:500])
        return
    tell()
    tell(shown=[asdict(each) for each in templates.look()])


def _answer(job: Mapping[str, Any], templates: Templates | Refused) -> bytes:
    """source: what is to be rendered; None only asks whether tools are shown"""
    try:
        if isinstance(templates, Refused):
            raise templates
        if job["source"] is None:
            return json.dumps({"shows_tools": templates.shown[1].tools}).encode()
        text, foreign = templates.render(job["source"], continues_last=job["continues_last"])
        return json.dumps({"text": text, "foreign": foreign}, ensure_ascii=False).encode()
    except Refused as refused:
        why = str(refused)
    except jinja2.TemplateError as error:
        why = f"it says: {error.message or type(error).__name__}"
    except MemoryError:
        why = "it takes too much memory"
    except Exception as error:
        why = f"it fails with {type(error).__name__}: {error}"
    return json.dumps({"refused": why[:500].rstrip(".")}).encode()
