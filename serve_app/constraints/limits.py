"""Bounds on what one constraint may cost, before it is taken and at every token."""

from __future__ import annotations

from dataclasses import dataclass

from llguidance import LLParserLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintLimits:
    """Everything in it is a tenant's to write, so everything it costs is bounded.

    max_cpu_s:       processor time of one trial, after which its process is ended by the kernel
    max_wall_s:      the same on the clock, where others have the processors
    courtesy_s:      after so long a trial runs at lower priority than the engine
    max_trial_bytes: memory of one trial beside the vocabulary
    max_trials:      at once, of those that have not run for long
    quick_s:         after so long a trial gives its place to others and takes one of the slow
    max_slow:        of these; where all are taken, a trial is ended after `quick_s` and its sender told to come again
    max_wait_s:      for a place; who waits longer is told to come again
    max_waiting:     constraints that wait for a place; more are refused
    max_cached, max_cached_chars: compiled constraints that are kept for later, and the length of their sources together
    """

    max_cpu_s: float = 1.0
    max_wall_s: float = 1.4
    courtesy_s: float = 0.05
    max_trial_bytes: int = 1 << 30
    max_trials: int = 4
    quick_s: float = 0.3
    max_slow: int = 4
    max_wait_s: float = 5.0
    max_waiting: int = 256
    max_cached: int = 256
    max_cached_chars: int = 4_000_000


DEFAULT_LIMITS = ConstraintLimits()
MAX_SHORTEST_CHARS = 65_536
"""Of the shortest text that a constraint leaves; nobody could write a longer one to its end."""


def parser_limits(*, has_rules: bool = False) -> LLParserLimits:
    """What the library itself bounds: the grammar's size, the lexer's states and the work for one mask.

    A quarter of its own limits or less, as many sequences share a step. What a mask may cost by these is some
    milliseconds; what people write stays far below.

    has_rules: that a client wrote. They may be ambiguous, and the work for a token of such a grammar grows with the
               cube of the items in a row. A schema is not, and its widest object has four items for each property that
               may be left out, which cost next to nothing.
    """
    return LLParserLimits(
        max_items_in_row=300 if has_rules else 2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=2_000 if has_rules else 10_000,
        max_lexer_states=25_000,
        max_grammar_size=250_000,
        verbose_errors=False,
    )
