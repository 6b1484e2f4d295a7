"""Renders conversations with the templates of one model; runs in the sandbox."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any

import jinja2

from serve_app.sandbox.child import bound_memory, bound_time, take_job
from serve_app.templates.environment import Marks, compiled, environment
from serve_app.templates.messages import (
    Members,
    Shown,
    as_transformers,
    emptied,
    in_parts,
    shows_parts_as_python,
    variants,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """A template is a model's maker's to write and messages are a tenant's, so everything they cost is bounded.

    max_cpu_s:      processor time of one rendering, after which its process is ended by the kernel
    max_wall_s:     the same on the clock, where others have the processors
    slow_after_s:   after so long a rendering runs at lower priority than the engine
    max_bytes:      memory of one rendering beside the template
    max_chars:      of the text that comes out
    max_renderings: at once, of conversations of at most `short_chars`, and of longer ones
    short_chars:    characters of a conversation's JSON
    max_waiting:    conversations that are rendered or wait for it; more are refused
    """

    max_cpu_s: float = 1.0
    max_wall_s: float = 1.4
    slow_after_s: float = 0.2
    max_bytes: int = 512 << 20
    max_chars: int = 8_000_000
    max_renderings: tuple[int, int] = (3, 1)
    short_chars: int = 65_536
    max_waiting: int = 512


MARKS_LEFT = "the template does not show the last message, which is to be continued"
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "blackberry", "arguments": '{"cherry": 1}'}}
PROBE: tuple[Members, ...] = (
    {"role": "user", "content": "apricot"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "blackberry", "tool_call_id": "abcdefghi", "content": "damson"},
)
"""A conversation of words that no template has, and a tool."""
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "elderberry",
        "description": "Fetch a fig.",
        "parameters": {"type": "object", "properties": {"grape": {"type": "string", "description": "Kind."}}},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every rendering of a model begins with.

    tool_template:  for conversations with tools; "" where that is the same one
    tells_form:     where a text of ours shows the tools, it says how to write a call; None is no such text
    special_names:  of every special token
    special_tokens: those that a template may ask for, by `bos_token` and the like
    """

    template: str
    tool_template: str = ""
    tells_form: bool | None = True
    special_names: tuple[str, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    limits: TemplateLimits = field(default_factory=TemplateLimits)


class Refused(Exception):
    """Nothing comes of the rendering; the message says why."""


class Templates:
    """The templates of a model, compiled: for chats without tools and with them. Raises what compiling raises.

    shown: what each of the two shows
    """

    def __init__(self, work: Work) -> None:
        default = Template(work.template, work)
        self._each = default, Template(work.tool_template, work) if work.tool_template else default
        self.shown = Shown(), Shown()

    def render(self, source: str, *, continues_last: bool) -> tuple[str, tuple[int, ...]]:
        """Render with the template for tools if there are any, as transformers does. Raises as `Template.render`."""
        members = json.loads(source)
        which = bool(members.get("tools"))
        return self._each[which].render(members, source, self.shown[which], continues_last=continues_last)

    def look(self) -> tuple[Shown, Shown]:
        """Find out what each template shows, by rendering a conversation of ours."""
        default, with_tools = self._each
        return default.look(), with_tools.look()


class Template:
    """One template, compiled as it is and with marks in what it writes itself."""

    def __init__(self, source: str, work: Work) -> None:
        self._source = source
        self._work = work
        self._now = datetime.now()
        self._around = environment(lambda: self._now)  # one time for both renderings
        self._plain = compiled(source, self._around)
        self._marks, self._marked = self._with_marks("")

    def render(
        self, members: Members, source: str, shown: Shown, *, continues_last: bool
    ) -> tuple[str, tuple[int, ...]]:
        """Return the text, and where in it are characters that could make a special token and are not the template's.

        source: the members as JSON
        Raises Refused, and whatever a template comes to.
        """
        self._now = datetime.now()
        if self._marks.stand_in(source):
            self._marks, self._marked = self._with_marks(source)
        members["messages"] = [as_transformers(message) for message in members["messages"]]
        members, text = self._first_shown(members, shown, continues_last=continues_last)
        if not self._work.special_names:
            return text, ()
        tokens = {name: self._marks.put(token) for name, token in self._work.special_tokens.items()}
        marked = self._written(self._marked, members, tokens, continues_last=continues_last)
        text = self._marks.take(marked)  # the same, unless the template looks at what it wrote itself
        return text, self._marks.foreign(text, marked, source)

    def look(self) -> Shown:
        """Find out what the template shows, by a conversation of ours."""
        first, call, result = PROBE
        messages = [[first, {**call, "content": content}, result] for content in ("", None)]
        histories = [self._tried(messages=[as_transformers(each) for each in chat]) for chat in messages]
        return Shown(
            text="apricot" in self._tried(messages=[first]) or "apricot" not in self._tried(messages=[in_parts(first)]),
            tools="elderberry" in self._tried(messages=[first], tools=[PROBE_TOOL]),
            history=any("blackberry" in text and "damson" in text for text in histories),
        )

    def _tried(self, **members: object) -> str:
        """Return the text of a rendering, or "" if it fails."""
        with suppress(Exception):
            return self._written(self._plain, {"add_generation_prompt": True, **members}, self._work.special_tokens)
        return ""

    def _first_shown(self, members: Members, shown: Shown, *, continues_last: bool) -> tuple[Members, str]:
        """Return the first variant that the template shows, and its text. Raises the last variant's error."""
        is_ours = not shown.tools and self._work.tells_form is not None
        tools = [tool["function"]["name"] for tool in members.get("tools") or ()] if is_ours else []
        failure: Exception = Refused("the template shows nothing")
        for each in variants(members, shown, tells_form=self._work.tells_form):
            try:
                text = self._written(self._plain, each, self._work.special_tokens, continues_last=continues_last)
            except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
                failure = error
                continue
            if shows_parts_as_python(each, text) or self._shows_none(each, text):
                failure = Refused("the template does not know a content of parts, or none")
            elif not all(name in text for name in tools):
                failure = Refused("the template does not show the tools")
            else:
                return each, text
        raise failure

    def _shows_none(self, members: Members, text: str) -> bool:
        """Return whether the template wrote `None` for a content that is null."""
        if "None" not in text or None not in [message.get("content", "") for message in members["messages"]]:
            return False
        emptied_text = self._tried(**{**members, "messages": [emptied(each) for each in members["messages"]]})
        return text.count("None") > emptied_text.count("None")

    def _written(
        self, template: jinja2.Template, members: Members, tokens: Mapping[str, str], *, continues_last: bool = False
    ) -> str:
        if continues_last:
            members = self._with_end(members)
        pieces, num_chars = [], 0
        for piece in template.generate({**tokens, "tools": None, "documents": None, **members}):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > self._work.limits.max_chars:
                raise Refused(f"it makes more than {self._work.limits.max_chars} characters of it")
        text = "".join(pieces)
        if not continues_last:
            return text
        before, end, behind = text.rpartition(self._marks.end)
        if not end:
            raise Refused(MARKS_LEFT)
        return before if behind.startswith(" ") else before.rstrip()  # as transformers where the template trims it

    def _with_end(self, members: Members) -> Members:
        """Return the members with a mark behind the last message's text."""
        *others, last = members["messages"]
        content, end = last.get("content"), f"{self._marks.end} "
        if isinstance(content, list):
            at = max((at for at, part in enumerate(content) if "text" in part), default=None)
            if at is None:
                raise Refused(MARKS_LEFT)
            part = {**content[at], "text": content[at]["text"] + end}
            content = [*content[:at], part, *content[at + 1 :]]
        else:
            content = (content or "") + end
        return {**members, "messages": [*others, {**last, "content": content}]}

    def _with_marks(self, besides: str) -> tuple[Marks, jinja2.Template]:
        marks = Marks(self._work.special_names, self._source + besides)
        return marks, compiled(self._source, self._around, marks.put)


MAX_JOBS = 1000
"""Of one child, so that whatever it gathers is let go of."""


def prepare(work: Work) -> Callable[[Connection], None]:
    """Compile the templates and return the work of each child: conversations one after the other, until the client
    leaves.
    """
    bound_memory(work.limits.max_bytes)  # before anything is compiled, which computes what is constant
    templates = _compiled(work)

    def take_many(connection: Connection) -> None:
        for _ in range(MAX_JOBS):
            job = take_job(connection)
            bound_time(cpu_s=work.limits.max_cpu_s, wall_s=work.limits.max_wall_s)
            connection.send_bytes(_answer(json.loads(job), templates))
            bound_time(cpu_s=0, wall_s=0)

    return take_many


def _compiled(work: Work) -> Templates | Refused:
    """Return the templates, after a child has seen that compiling them ends well; otherwise the reason."""
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
    """Return the answer to one job.

    source: what is to be rendered; None only asks whether tools are shown
    """
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
