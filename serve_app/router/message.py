"""Reads one text of a chat as it comes: what was thought, what was said, which tools were called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from types import MappingProxyType

from serve_app.api.chat import ChatRequest
from serve_app.api.completion import CompletionRequest
from serve_app.api.responses import Choice
from serve_app.core.cards import ModelCard
from serve_app.core.delta import Finish, FinishReason
from serve_app.core.request import Constraint
from serve_app.core.tools import ReasoningParserName, ToolCallDelta, ToolParserName, Tools
from serve_app.tools.forms import JSON, Form, call_constraint, form_for
from serve_app.tools.literals import MarkFinder
from serve_app.tools.parser import CallParser, Parsed, parse_whole


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ThoughtForm:
    """How thoughts stand in a text.

    openers, closers: before a thought and behind it
    dropped:  marks around what is said, which are neither thought nor content
    begins:   the text begins within a thought, unless the prompt has closed one
    returns:  thoughts may also stand behind something that was said, and no mark of theirs is content
    reads_prompt: the end of the prompt says whether the text begins within a thought
    others:   forms of which any may begin the text, because nothing is known of the model
    """

    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    begins: bool = False
    returns: bool = False
    reads_prompt: bool = True
    others: tuple[ThoughtForm, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Return every mark that a text without special tokens may lack."""
        return (*self.openers, *self.closers, *self.dropped)

    def is_open(self, before: str) -> bool:
        """Return whether a text behind this one begins within a thought."""
        opened, closed = _last(self.openers, before), _last(self.closers, before)
        return opened > closed or (self.begins and closed < 0)


NONE = ThoughtForm(reads_prompt=False)
THINK = ThoughtForm(openers=("<think>",), closers=("</think>",))
BEGUN = replace(THINK, begins=True)
HUNYUAN = replace(THINK, dropped=("<answer>\n", "<answer>", "\n</answer>", "</answer>"))
ERNIE = replace(THINK, dropped=("<response>\n", "<response>", "\n</response>\n", "\n</response>", "</response>"))
KIMI = ThoughtForm(openers=("◁think▷",), closers=("◁/think▷",))
MISTRAL = ThoughtForm(openers=("[THINK]",), closers=("[/THINK]",))
SEED_OSS = ThoughtForm(openers=("<seed:think>",), closers=("</seed:think>",))
EXAONE = ThoughtForm(openers=("<thought>",), closers=("</thought>",))
MINICPM = ThoughtForm(openers=("<|thought_start|>",), closers=("<|thought_end|>",))
OPENTHINKER = ThoughtForm(
    openers=("<|begin_of_thought|>",),
    closers=("<|end_of_thought|>",),
    dropped=("<|begin_of_solution|>", "<|end_of_solution|>"),
)
GEMMA4 = ThoughtForm(openers=("<|channel>thought",), closers=("<channel|>",), dropped=("<turn|>",), returns=True)
COMMAND_A = ThoughtForm(
    openers=("<|START_THINKING|>",),
    closers=("<|END_THINKING|>",),
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    returns=True,
)
GRANITE = ThoughtForm(
    openers=("Here is my thought process:", "Here's my thought process:"),
    closers=("Here is my response:", "Here's my response:"),
)
APRIEL = ThoughtForm(
    openers=("Here are my reasoning steps:",),
    closers=("[BEGIN FINAL RESPONSE]",),
    dropped=("\n[END FINAL RESPONSE]", "[END FINAL RESPONSE]"),
)
HARMONY = ThoughtForm(
    openers=("<|channel|>analysis<|message|>",),
    closers=("<|end|>", "<|return|>", "<|start|>assistant"),
    dropped=(
        "<|start|>assistant",
        "<|channel|>final<|message|>",
        "<|channel|>final <|constrain|>json<|message|>",
        "<|channel|>commentary<|message|>",
        "<|end|>",
        "<|return|>",
    ),
    returns=True,
)
UNKNOWN = ThoughtForm(
    reads_prompt=False,
    others=(THINK, MISTRAL, KIMI, SEED_OSS, EXAONE, MINICPM, OPENTHINKER, GEMMA4, COMMAND_A, HARMONY),
)
"""Nothing is known of the model: a text that begins with a mark of these thinks."""

THOUGHTS: Mapping[ReasoningParserName, ThoughtForm] = MappingProxyType(
    {
        "none": NONE,
        **dict.fromkeys(
            (
                "think", "qwen3", "glm45", "deepseek_v3", "deepseek-v3", "deepseek_v31", "nemotron_v3", "nano_v3",
                "olmo3", "interns1", "mimo", "kimi_k2", "smollm3", "holo2",
            ),
            THINK,
        ),
        **dict.fromkeys(
            (
                "deepseek_r1", "deepseek-r1", "qwen3-thinking", "step3", "step3p5", "minimax", "minimax_m2",
                "minimax_m2_append_think", "minimax-append-think",
            ),
            BEGUN,
        ),
        **dict.fromkeys(("hunyuan_a13b", "hunyuan"), HUNYUAN),
        "ernie45": ERNIE,
        "kimi": KIMI,
        **dict.fromkeys(("mistral", "magistral"), MISTRAL),
        "seed_oss": SEED_OSS,
        "exaone": EXAONE,
        "minicpm": MINICPM,
        "openthinker": OPENTHINKER,
        "gemma4": GEMMA4,
        **dict.fromkeys(("command_a", "cohere_command3"), COMMAND_A),
        "granite": GRANITE,
        "apriel": APRIEL,
        **dict.fromkeys(("harmony", "openai_gptoss", "gpt-oss", "gpt_oss"), HARMONY),
    }
)  # fmt: skip

SHOWN: tuple[tuple[tuple[str, ...], ThoughtForm], ...] = (
    (("<|channel|>",), HARMONY),
    *((each.openers[:1], each) for each in (COMMAND_A, SEED_OSS, KIMI, MISTRAL, OPENTHINKER, MINICPM, GRANITE)),
    (("<|channel>",), GEMMA4),
    (("[BEGIN FINAL RESPONSE]",), APRIEL),
    (("<think>", "<answer>"), HUNYUAN),
    (("</think>", "<response>"), ERNIE),
    (("</think>",), THINK),
    (("<think>",), THINK),
    (("<thought>",), EXAONE),
)
"""What a template with all of these marks shows; the most telling first."""


def thoughts_for(template: str, reasoning_parser: ReasoningParserName | None = None) -> ThoughtForm:
    """Return the named form, else the one that the template shows the model."""
    if reasoning_parser is not None:
        return THOUGHTS[reasoning_parser]
    return next((form for marks, form in SHOWN if all(mark in template for mark in marks)), UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What a piece of text adds to what is thought and to what is said."""

    reasoning: str = ""
    content: str = ""

    def __add__(self, other: Split) -> Split:
        return Split(reasoning=self.reasoning + other.reasoning, content=self.content + other.content)


class _Place(Enum):
    START = auto()
    THINKING = auto()
    SAYING = auto()


class ReasoningSplitter:
    """Divides a text, as it comes, into what is thought and what is said.

    White space around either part is left out, and a piece is shown as soon as it cannot be part of a mark.

    before: what stands before the text
    """

    def __init__(self, form: ThoughtForm, *, before: str = "") -> None:
        self._place = _Place.START
        self._held = ""
        self._is_last = False
        self._has_shown = self._has_thought = False
        self._forms = (form, *form.others)
        begun = next((each for each in self._forms if each.is_open(before)), None)
        self._use(form if begun is None else begun)
        self._is_begun = begun is not None

    def _use(self, form: ThoughtForm) -> None:
        self._form = form
        self._closers = MarkFinder(form.closers)
        self._around = MarkFinder((*form.dropped, *(form.openers + form.closers if form.returns else ())))

    @property
    def is_over(self) -> bool:
        """Return whether everything that follows is said, to the letter."""
        is_said = self._place is _Place.SAYING and self._has_shown
        return is_said and not self._form.dropped and not self._form.returns

    def feed(self, text: str) -> Split:
        """Take more of the text and return what it adds."""
        self._held += text
        shown, before = Split(), None
        while before != (self._place, self._held):
            before = (self._place, self._held)
            shown += self._step()
        return shown

    def flush(self) -> Split:
        """End the text and return what was held back, as what it seems to be."""
        self._is_last = True
        return self.feed("")

    def _step(self) -> Split:
        match self._place:
            case _Place.START:
                return self._start()
            case _Place.THINKING:
                return self._think()
            case _Place.SAYING:
                return self._say()

    def _start(self) -> Split:
        begun = self._held.lstrip()
        forms = {opener: form for form in self._forms for opener in form.openers}
        opener = next(filter(begun.startswith, forms), None)
        if opener is not None:
            self._use(forms[opener])
            self._held, self._place = begun[len(opener) :], _Place.THINKING
        elif self._is_last or not any(each.startswith(begun) for each in forms):
            self._place, self._has_shown = _Place.SAYING, True
            if self._is_begun:
                self._place, self._has_shown = _Place.THINKING, False
        return Split()

    def _think(self) -> Split:
        if not self._has_shown:
            self._held = self._held.lstrip()
        thought, closer = self._up_to(self._closers)
        certain = thought.rstrip()
        shown = self._thought(certain)
        if closer:
            self._place, self._has_shown = _Place.SAYING, False
        elif not self._is_last:
            self._held = thought[len(certain) :] + self._held
        return shown

    def _thought(self, thought: str) -> Split:
        """Return a thought, behind a line break if another stands before it."""
        if not thought:
            return Split()
        between = "\n" if self._has_thought and not self._has_shown else ""
        self._has_shown = self._has_thought = True
        return Split(reasoning=between + thought)

    def _say(self) -> Split:
        if not self._has_shown:
            self._held = self._held.lstrip()
        said, mark = self._up_to(self._around)
        self._has_shown = self._has_shown or bool(said)
        if mark in self._form.openers:
            self._place, self._has_shown = _Place.THINKING, False
        return Split(content=said)

    def _up_to(self, finder: MarkFinder) -> tuple[str, str]:
        """Return what certainly stands before the next mark, and that mark; "" if it has not come yet."""
        at, mark = finder.find(self._held, is_last=self._is_last)
        said, self._held = self._held[:at], self._held[at + len(mark) :]
        return said, mark


def _last(marks: tuple[str, ...], text: str) -> int:
    """Return the place of the last of these marks in the text; -1 is nowhere."""
    return max((text.rfind(mark) for mark in marks), default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How one model writes calls and thoughts."""

    calls: Form
    thoughts: ThoughtForm


def writing_of(card: ModelCard | None) -> Writing:
    """Return its operator's choice, else what its template shows; a model that is gone writes as an unknown one."""
    if card is None:
        return Writing(calls=form_for(""), thoughts=thoughts_for(""))
    of_default_text: ToolParserName | None = "hermes" if card.tool_prompt == "prompt" else None
    return Writing(
        calls=form_for(card.template_for(has_tools=True), card.tool_parser or of_default_text),
        thoughts=thoughts_for(card.chat_template, card.reasoning_parser),
    )


def marks_to_show(request: CompletionRequest, writing: Writing) -> tuple[str, ...]:
    """Return the marks that the reader needs in the text, although special tokens are not shown."""
    if not isinstance(request, ChatRequest) or not request.skip_special_tokens:
        return ()
    of_thoughts = writing.thoughts.marks if request.splits_reasoning else ()
    return of_thoughts + (writing.calls.marks if request.tool_use.usable else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a piece of the text adds to its message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: FinishReason | None = None


class MessageReader:
    """Thoughts first, then calls within what is said.

    splitter: None where there are no thoughts;  parser: None where nothing may be called
    is_parallel: False keeps the first call alone
    """

    def __init__(
        self, splitter: ReasoningSplitter | None, parser: CallParser | None, *, is_parallel: bool = True
    ) -> None:
        self._splitter = splitter
        self._parser = parser
        self._is_parallel = is_parallel

    @property
    def is_text_alone(self) -> bool:
        """Return whether everything that it reads from now on is said, piece by piece."""
        return self._parser is None and (self._splitter is None or self._splitter.is_over)

    def read(self, text: str, finish: Finish | None) -> Gain:
        """Take more of the text and return what it adds; `finish` comes with the last of it."""
        split = self._split(text, is_last=finish is not None)
        parsed = self._parsed(split.content, finish)
        calls = tuple(call for call in parsed.calls if self._is_parallel or call.index == 0)
        reason = None if finish is None else self._reason(finish)
        return Gain(content=parsed.content, reasoning=split.reasoning, calls=calls, finish_reason=reason)

    def _split(self, text: str, *, is_last: bool) -> Split:
        if self._splitter is None:
            return Split(content=text)
        split = self._splitter.feed(text)
        return split + self._splitter.flush() if is_last else split

    def _parsed(self, text: str, finish: Finish | None) -> Parsed:
        if self._parser is None:
            return Parsed(content=text)
        fed = self._parser.feed(text)
        if finish is None:
            return fed
        has_ended_itself = finish.reason is FinishReason.STOP and not isinstance(finish.matched_stop, str)
        rest = self._parser.flush(is_cut=not has_ended_itself)
        return Parsed(content=fed.content + rest.content, calls=fed.calls + rest.calls)

    def _reason(self, finish: Finish) -> FinishReason:
        """Return why the text ended. If it ended by itself behind a call, the call is the reason."""
        has_called = self._parser is not None and self._parser.has_calls and self._parser.is_whole
        return FinishReason.TOOL_CALLS if has_called and finish.reason is FinishReason.STOP else finish.reason


def message_reader(request: ChatRequest, writing: Writing, *, before: str) -> MessageReader:
    """Return the reader of one text of this request. before: what stands before the text"""
    tools, form, parser = request.tool_use, writing.calls, None
    splitter = ReasoningSplitter(writing.thoughts, before=before) if request.splits_reasoning else None
    if tools.usable:
        parser = CallParser(form, tools.usable, shows_marks=not request.skip_special_tokens)
    return MessageReader(splitter, parser, is_parallel=tools.is_parallel)


def constraint_of(request: CompletionRequest) -> Constraint | None:
    """Return what each text has to be. Tools that may be called and are not strict demand nothing."""
    tools = request.tool_use
    if tools.choice.mode == "required" or any(tool.is_strict for tool in tools.usable):
        return call_constraint(tools, JSON, request.constraint)
    return request.constraint


class CallReader:
    """Reads the calls of each choice's text once it has ended."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools.usable
        self._texts: dict[int, list[str]] = {}

    def note(self, index: int, text: str) -> None:
        """Remember what a choice's text gained."""
        if self._tools:
            self._texts.setdefault(index, []).append(text)

    def finished(self, choice: Choice) -> Choice:
        """Return the end of a choice, with its calls if its text is nothing else."""
        text = "".join(self._texts.pop(choice.index, ()))
        if not text:
            return choice
        content, calls = parse_whole(JSON, text, self._tools)
        if content or not calls or not _is_json(text):
            return choice
        has_stopped = choice.finish_reason is FinishReason.STOP
        reason = FinishReason.TOOL_CALLS if has_stopped else choice.finish_reason
        return replace(choice, tool_calls=calls, finish_reason=reason)


def _is_json(text: str) -> bool:
    """Return whether the text is JSON. The parser also reads calls whose last brace is missing."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
