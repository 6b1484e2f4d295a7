"""The process that renders: it keeps the compiled template and forks for those who ask, so that any may be ended.

Run by `renderer.Renderer`. A template is looked at only where the kernel ends what takes too
long or too much, whatever it is doing then: first of all when it is compiled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import jinja2

from serve_app.apart.bounds import bound_memory, bound_time
from serve_app.apart.forking import serve_forks, tell_who
from serve_app.templates.environment import environment, variables_of
from serve_app.templates.limits import TemplateLimits
from serve_app.templates.marks import Marks, marks_for

COMPILED = "compiled"
COME = b"come"
MAX_JOBS = 1000
"""Of one child, so that whatever it gathers is let go of."""
MARKS_LEFT = "the template does not show the last message, which is to be continued"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every rendering of a model begins with.

    special_names:  of every special token
    special_tokens: those that a template may ask for, by `bos_token` and the like
    """

    template: str
    special_names: tuple[str, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    limits: TemplateLimits = field(default_factory=TemplateLimits)


class Refused(Exception):
    """Nothing comes of the rendering; the message says why."""


class Keeper:
    """Stands for the marks of the conversation that is rendered, which the template is compiled before."""

    def __init__(self) -> None:
        self.marks: Marks | None = None

    def keep(self, text: str) -> str:
        return text if self.marks is None else self.marks.keep(text)


def prepare(work: Work) -> Callable[[Connection], None]:
    """Each child takes conversations one after the other, answers each, and ends with the other side.

    Each is told to have come before it is looked at: what is lost behind that was lost to it.
    """
    bound_memory(work.limits.max_bytes)  # before anything is compiled, which computes what is constant
    keeper = Keeper()
    template = _compiled(work, keeper)

    def take_many(connection: Connection) -> None:
        for _ in range(MAX_JOBS):
            tell_who(connection)
            received = connection.recv_bytes()
            connection.send_bytes(COME)
            bound_time(cpu_s=work.limits.max_cpu_s, wall_s=work.limits.max_wall_s)
            connection.send_bytes(_answer(json.loads(received), template, keeper, work=work))
            bound_time(cpu_s=0, wall_s=0)

    return take_many


def rendered(
    job: Mapping[str, Any], template: jinja2.Template, keeper: Keeper, *, work: Work
) -> tuple[str, tuple[int, ...]]:
    """The text, and where in it are characters that could make a special token and are not the template's.

    Raises Refused, and whatever a template comes to.
    """
    source = job["source"]
    marks = keeper.marks = marks_for(work.special_names, source + work.template)
    members = marks.put(json.loads(source))
    assert isinstance(members, dict)
    if job["continues_last"]:
        members["messages"][-1]["content"] = (members["messages"][-1].get("content") or "") + marks.end
    pieces, num_chars = [], 0
    for piece in template.generate(variables_of(members, work.special_tokens)):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > work.limits.max_chars:
            raise Refused(f"it makes more than {work.limits.max_chars} characters of it")
    text = "".join(pieces)
    if job["continues_last"]:
        text, end, _ = text.rpartition(marks.end)
        if not end:
            raise Refused(MARKS_LEFT)
    taken = marks.take(text)
    return taken.text, taken.foreign


def _compiled(work: Work, keeper: Keeper) -> jinja2.Template | Refused:
    """The template, once a child of ours has seen that compiling it ends well; or why there is none."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        bound_time(cpu_s=work.limits.max_cpu_s, wall_s=work.limits.max_wall_s)
        with suppress(BaseException):
            os.write(writing, _try_to_compile(work, keeper).encode()[:500])
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as told:
        found = told.read()
    os.waitpid(child, 0)
    if found != COMPILED:
        return Refused(found or "it takes too much time or memory to compile")
    return environment(keeper.keep).from_string(work.template)


def _try_to_compile(work: Work, keeper: Keeper) -> str:
    try:
        environment(keeper.keep).from_string(work.template)
    except jinja2.TemplateSyntaxError as error:
        return f"it cannot be compiled: {error.message} at line {error.lineno}"
    return COMPILED


def _answer(job: Mapping[str, Any], template: jinja2.Template | Refused, keeper: Keeper, *, work: Work) -> bytes:
    try:
        if isinstance(template, Refused):
            raise template
        text, foreign = rendered(job, template, keeper, work=work)
        return json.dumps({"text": text, "foreign": foreign}, ensure_ascii=False).encode()
    except Refused as refused:
        why = str(refused)
    except jinja2.TemplateError as error:
        why = f"it says: {error.message or type(error).__name__}"
    except MemoryError:
        why = "it takes too much memory"
    except Exception as error:
        why = f"it fails with {type(error).__name__}: {error}"
    shown = keeper.marks.take(why).text if keeper.marks is not None else why
    return json.dumps({"refused": shown[:500].rstrip(".")}).encode()


if __name__ == "__main__":
    serve_forks(prepare)
