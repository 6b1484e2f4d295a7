"""What comes back: deltas of sequences with what was recorded of them, and the frames that carry them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain

from serve_app.core.errors import ServeError
from serve_app.core.ledger import Spent


class FinishReason(StrEnum):
    """Why a sequence ended; the values of all systems, docs/contract.md#fields."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    CONTENT_FILTER = "content_filter"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """One of the likeliest tokens at a position."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token with its log-probability under the raw distribution, float32.

    text:    the token alone; bytes that are no whole characters are written `bytes:\\x..`
    logprob: None for the first token of a prompt, which nothing predicts
    offset:  characters of text before the token, counted in the completion (or in the echo, for the prompt's tokens);
             what goes on with a character has that character's place
    rank:    how many tokens are at least as likely, itself included; None if the request did not ask
    """

    token_id: int
    text: str
    logprob: float | None
    offset: int
    top: tuple[TopLogprob, ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReport:
    """What the engine says of a prompt, once, before its first token.

    num_dropped_tokens: of its beginning, which did not fit the context
    queue_s:   from its arrival to the first step that took it in
    text:      what of the prompt is echoed, where echo asked for it
    logprobs:  one entry per echoed token, where they were asked for
    whole_logprobs: one entry per token of the prompt, where those were asked for whatever is echoed; without offsets
    token_ids: of the whole prompt, where they were asked for
    unenforced_formats: of the completion's JSON schema, which are taken for annotations
    tail:      the end of its text, special tokens by their names, where it was asked for
    """

    num_tokens: int
    num_cached_tokens: int
    num_dropped_tokens: int = 0
    queue_s: float = 0.0
    text: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    whole_logprobs: tuple[TokenLogprob, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    unenforced_formats: tuple[str, ...] = ()
    tail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end of a sequence.

    matched_stop: the stop string, or the id of the token, that ended it; None where length did
    num_tokens:   generated tokens in all, those never shown included
    is_context_end: length ended it because the context was full, not because enough was generated
    predicted:    guesses that were computed for it, drawn and not drawn; None where its client expected nothing
    engine_ns:    of the steps' time, its share of each that computed something of it; measured, so that equal ends may
                  differ in it
    """

    reason: FinishReason
    matched_stop: str | int | None
    num_tokens: int
    is_context_end: bool = False
    predicted: tuple[int, int] | None = None
    engine_ns: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What was wanted, of one sequence; little-endian and in C order.

    hidden_states: float32 [states, hidden], what the last layer and its norm gave; of a classification head its scores,
                   [1, labels]; b"" where it was not asked for
    num_states:    how many of them
    experts:       int32 [positions, layers, experts per token], in the order in which they were chosen; -1 all along a
                   layer without experts; b"" where it was not asked for, or the model has none
    experts_shape: these three
    """

    hidden_states: bytes = b""
    num_states: int = 0
    experts: bytes = b""
    experts_shape: tuple[int, int, int] = (0, 0, 0)

    @property
    def num_bytes(self) -> int:
        return len(self.hidden_states) + len(self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to one sequence.

    sample:    which of the request's `n` continuations
    token_ids: every token sampled since the last delta, shown or not
    text:      new text that is certain to stay: whole characters, nothing of a stop string
    logprobs:  of the tokens whose text begins in what was shown so far, and of the token that ended the sequence, shown
               or not; empty unless asked for
    prompt:    on the first delta of sample 0 of a request, and only there
    finish:    on the last delta of a sequence, and only there
    recording: beside the finish, where the request wanted one
    error:     instead of a finish, where the sequence was lost
    mu:        Mirostat's bound behind these tokens; None without Mirostat
    """

    request_id: str
    sample: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt: PromptReport | None = None
    finish: Finish | None = None
    recording: Recording | None = None
    error: ServeError | None = None
    mu: float | None = None

    @property
    def is_bare(self) -> bool:
        """Whether it has text and tokens and nothing else, as most."""
        return self.mu is None and not (self.logprobs or self.prompt or self.finish or self.recording or self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a replica is.

    num_running: sequences in the batch;  num_waiting: sequences queued
    num_free_blocks, num_blocks: of the key/value store; cached blocks count as free, they give way
    num_cached_blocks: blocks that hold nothing but prefixes kept for later; None where the engine does not count them
    block_bytes: what one block takes, so that num_blocks * block_bytes is the budget
    num_steps, num_preemptions, num_prefix_hit_tokens: since the replica began
    num_drafted_tokens, num_accepted_tokens: guesses that were computed since then, and those of them that were drawn
    step_s: seconds spent in steps since then
    num_failures: failed steps, commands and deliveries since then; the engine went on after each
    num_generated: tokens since then
    spent: since then, by each flow for which something was spent since the last frame
    """

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_cached_blocks: int | None = 0
    block_bytes: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_prefix_hit_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    step_s: float = 0.0
    num_failures: int = 0
    num_generated: int = 0
    spent: tuple[Spent, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """All deltas for one router, of one step, or of several if the reader was slower.

    A frame without deltas tells a router what was spent, or that the replica's card has changed.

    adapters_revision: what the card has now, where that has changed since the last frame; else 0
    """

    deltas: tuple[Delta, ...]
    load: Load = field(default_factory=Load)
    adapters_revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a whole response: each prompt once, every generated token of every choice.

    truncated_tokens: of prompts' beginnings, which did not fit the context and are in no other number
    unenforced_formats: what of the completions' JSON schema was taken for annotations; no number, but known as late
    predicted: guesses that were computed, drawn and not drawn; None where nothing was expected of a completion
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    truncated_tokens: int = 0
    predicted: tuple[int, int] | None = None
    unenforced_formats: tuple[str, ...] = ()

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def joined(deltas: Sequence[Delta]) -> Delta:
    """Give the one delta that says what these deltas of one sequence say, in their order."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        prompt=next((delta.prompt for delta in deltas if delta.prompt is not None), None),
    )


def joined_by_sequence(deltas: Iterable[Delta]) -> list[Delta]:
    """Return one delta for each sequence among these, in the order in which the sequences first come."""
    by_sequence: dict[tuple[str, int], list[Delta]] = {}
    for delta in deltas:
        by_sequence.setdefault((delta.request_id, delta.sample), []).append(delta)
    return [joined(each) for each in by_sequence.values()]
