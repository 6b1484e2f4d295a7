"""Completions as a notebook has them: texts with their tokens, a table, a page; and how answers become them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import pandas

from serve_app.cli.screen import common_length
from serve_app.lab import markup
from serve_app.lab.markup import Token, tokens_of

COLUMNS = ("prompt", "model", "text", "finish_reason", "logprob")
MAX_SHOWN = 64
"""Choices of a page; the rest is in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One choice.

    prompt:     as it was sent; of a chat its last message
    model:      that answered
    tokens:     with log-probabilities; empty where `logprobs` was not sent
    tool_calls: of a chat, in OpenAI's shape
    is_chat:    whether the text answers the prompt, and does not go on with it
    """

    index: int
    prompt: str
    model: str
    text: str
    finish_reason: str | None
    tokens: tuple[Token, ...] = ()
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    is_chat: bool = False

    @property
    def logprob(self) -> float | None:
        """Of the whole text, in nats; None where no log-probabilities were asked for."""
        known = [token.logprob for token in self.tokens if token.logprob is not None]
        return sum(known) if known else None

    def frame(self) -> pandas.DataFrame:
        """A row per token: its text, log-probability, probability, and the likeliest at its place, as JSON."""
        return pandas.DataFrame(
            {
                "token": [token.text for token in self.tokens],
                "logprob": [token.logprob for token in self.tokens],
                "probability": [token.probability for token in self.tokens],
                "alternatives": storable([dict(token.alternatives) for token in self.tokens]),
            }
        )

    def _repr_html_(self) -> str:
        note = self.model if self.finish_reason in (None, "stop") else f"{self.model} · {self.finish_reason}"
        body = markup.shaded(self.tokens) if self.tokens else markup.escaped(self.text)
        body += "".join(markup.escaped(f"→ {_called(call)}") for call in self.tool_calls)
        return markup.block(self.prompt + ("\n" if self.is_chat else ""), body, note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions(Sequence[Completion]):
    """All choices of one call, by index.

    usage:   tokens as the service counted them
    seconds: until the last of them was here
    told:    what the service said beside: `seed`, the version that was `served`, and `ignored` parameters, if any
    """

    choices: tuple[Completion, ...]
    usage: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    told: Mapping[str, str] = field(default_factory=dict)

    @overload
    def __getitem__(self, at: int) -> Completion: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Completion]: ...
    def __getitem__(self, at: int | slice) -> Completion | Sequence[Completion]:
        return self.choices[at]

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def text(self) -> str:
        """Of the only choice; ValueError where there are several."""
        if len(self.choices) != 1:
            raise ValueError(f"There are {len(self.choices)} texts: take one, as in `completions[0].text`.")
        return self.choices[0].text

    def frame(self) -> pandas.DataFrame:
        """A row per choice."""
        return pandas.DataFrame(
            {name: [getattr(each, name) for each in self.choices] for name in COLUMNS},
            index=pandas.Index([each.index for each in self.choices], name="choice"),
        )

    def _repr_html_(self) -> str:
        shown = [each._repr_html_() for each in self.choices[:MAX_SHOWN]]
        rest = len(self.choices) - MAX_SHOWN
        more = [markup.quiet(f"and {rest} more: see frame()")] if rest > 0 else []
        return markup.column([*shown, *more], self.foot())

    def foot(self) -> str:
        """HTML: what it took, and what of the request was ignored."""
        if not self.usage:
            return ""
        counts = f"{self.usage.get('prompt_tokens', 0)} + {self.usage.get('completion_tokens', 0)} tokens"
        ignored = f" · ignored: {self.told['ignored']}" if "ignored" in self.told else ""
        return markup.quiet(f"{counts} · {self.seconds:.2f} s{ignored}")


def _called(call: Mapping[str, Any]) -> str:
    function = call.get("function", {})
    return f"{function.get('name')}({function.get('arguments')})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What each model made of each prompt, computed in one request and in the same batches.

    completions: [models · prompts · n], in that order
    """

    prompts: tuple[str, ...]
    models: tuple[str, ...]
    completions: Completions

    @property
    def num_samples(self) -> int:
        """Completions of one model for one prompt."""
        return len(self.completions) // max(1, len(self.models) * len(self.prompts))

    def of(self, model: str, prompt: int = 0, sample: int = 0) -> Completion:
        """One of them, by the model's name and the place of its prompt."""
        row = self.models.index(model) * len(self.prompts) + prompt
        return self.completions[row * self.num_samples + sample]

    def row(self, prompt: int = 0, sample: int = 0) -> list[Completion]:
        """One prompt's, in the order of the models."""
        return [self.of(model, prompt, sample) for model in self.models]

    def first_difference(self, prompt: int = 0, sample: int = 0) -> int:
        """How many characters all models wrote alike before two of them part."""
        return common_length([each.text for each in self.row(prompt, sample)])

    def frame(self) -> pandas.DataFrame:
        """A row per prompt (and sample), a column per model."""
        return pandas.DataFrame(
            [[each.text for each in self.row(*place)] for place in self._places()],
            index=pandas.Index([self.prompts[prompt] for prompt, _ in self._places()], name="prompt"),
            columns=list(self.models),
        )

    def _repr_html_(self) -> str:
        rows = [
            markup.compared(
                self.prompts[place[0]], [each.text for each in self.row(*place)], self.first_difference(*place)
            )
            for place in self._places()[:MAX_SHOWN]
        ]
        return markup.side_by_side(["prompt", *self.models], rows, self.completions.foot())

    def _places(self) -> list[tuple[int, int]]:
        return [(prompt, sample) for prompt in range(len(self.prompts)) for sample in range(self.num_samples)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request was about, which its answer does not repeat.

    prompts: as they are shown
    models:  one, or several that each answer every prompt
    """

    prompts: tuple[str, ...]
    models: tuple[str, ...]
    num_samples: int = 1
    is_chat: bool = False

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * len(self.models) * self.num_samples

    def prompt_of(self, index: int) -> str:
        """By a choice's index, which is (model · prompts + prompt) · n + sample."""
        return self.prompts[index // self.num_samples % len(self.prompts)]

    def model_of(self, index: int) -> str:
        return self.models[index // (self.num_samples * len(self.prompts))]


@dataclass(slots=True, kw_only=True)
class Draft:
    """A choice while it is read."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[Token] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, part: Mapping[str, Any]) -> str:
        """Take what a body or a chunk has of it; returns the text that it adds."""
        message = part.get("delta") or part.get("message") or {}
        text = part.get("text") or message.get("content") or ""
        self.text += text
        self.tokens += tokens_of(part.get("logprobs"))
        self.finish_reason = part.get("finish_reason") or self.finish_reason
        for at, call in enumerate(message.get("tool_calls") or part.get("tool_calls") or ()):
            self._add_call(call.get("index", at), call)
        return text

    def _add_call(self, index: int, call: Mapping[str, Any]) -> None:
        """The first piece of a call names it, those behind it bring its arguments."""
        function = call.get("function") or {}
        known = self.calls.setdefault(
            index, {"id": call.get("id"), "type": "function", "function": {"name": "", "arguments": ""}}
        )
        known["function"]["name"] += function.get("name") or ""
        known["function"]["arguments"] += function.get("arguments") or ""


@dataclass(slots=True, kw_only=True)
class Reading:
    """All choices of one answer while they are read."""

    asked: Asked
    drafts: dict[int, Draft] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)

    @property
    def num_finished(self) -> int:
        return sum(draft.finish_reason is not None for draft in self.drafts.values())

    def add(self, body: Mapping[str, Any]) -> str:
        """Take a body or a chunk; returns what it adds to the first choice."""
        shown = ""
        for part in body.get("choices") or ():
            added = self.drafts.setdefault(part["index"], Draft()).add(part)
            shown += added if part["index"] == 0 else ""
        if body.get("usage"):
            self.usage = counts(body["usage"])
        return shown

    def choices(self) -> tuple[Completion, ...]:
        """What was read so far, by index."""
        return tuple(
            Completion(
                index=index,
                prompt=self.asked.prompt_of(index),
                model=self.asked.model_of(index),
                text=draft.text,
                finish_reason=draft.finish_reason,
                tokens=tuple(draft.tokens),
                tool_calls=tuple(draft.calls[at] for at in sorted(draft.calls)),
                is_chat=self.asked.is_chat,
            )
            for index, draft in sorted(self.drafts.items())
        )


def counts(usage: Mapping[str, Any]) -> dict[str, int]:
    """Tokens of an answer, those found in the cache among them."""
    details = usage.get("prompt_tokens_details") or {}
    return {
        "prompt_tokens": int(usage.get("prompt_tokens") or 0),
        "cached_tokens": int(details.get("cached_tokens") or 0),
        "completion_tokens": int(usage.get("completion_tokens") or 0),
    }


def shown_prompt(prompt: object) -> str:
    """A prompt as a person reads it; token ids and mixed prompts as they were sent."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        return str(prompt.get("content") or "")
    return str(prompt)


def prompts_of(prompt: str | Sequence[Any]) -> tuple[Any, ...]:
    """A list with a token id at its top is one prompt, any other is a list of prompts."""
    if isinstance(prompt, str) or any(isinstance(each, int) for each in prompt):
        return (prompt,)
    return tuple(prompt)


def table_of(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return a row for each, in columns that Parquet can hold."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pandas.DataFrame({name: storable([row.get(name) for row in rows]) for name in names})


def storable(values: list[Any]) -> list[Any]:
    """Return values of one kind: as they are, or where they differ, and of lists and objects, as JSON."""
    kinds = {float if type(value) is int else type(value) for value in values if value is not None}
    if len(kinds) <= 1 and kinds <= {bool, float, str}:
        return values
    return [None if value is None else json.dumps(value) for value in values]


def plain(value: Any) -> Any:
    """Return a value as JSON has it: numbers, arrays and columns of numpy and pandas as Python's own."""
    if isinstance(value, Mapping):
        return {plain(name): plain(each) for name, each in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def joined(parts: Iterable[tuple[Completion, ...]]) -> tuple[Completion, ...]:
    """Choices of several requests as if they were of one."""
    every = [each for part in parts for each in part]
    return tuple(replace(each, index=index) for index, each in enumerate(every))
