"""What a sequence has spent: every token once, when it is there, whatever becomes of it."""

from __future__ import annotations

from collections.abc import Iterable

from serve_app.engine.scheduler.accounts import Account, Accounts
from serve_app.engine.scheduler.sequence import Sequence


def count_tokens(sequence: Sequence, account: Account) -> None:
    """Add what it got since the last time: generated tokens, and its prompt once it was told of that."""
    completion = sequence.num_taken - sequence.num_charged
    sequence.num_charged += completion
    account.completion_tokens += completion
    if sequence.was_reported and not sequence.is_prompt_charged:
        sequence.is_prompt_charged = True
        account.prompt_tokens += sequence.prompt_length
        account.cached_tokens += sequence.num_cached_tokens


def note_tokens(sequences: Iterable[Sequence], accounts: Accounts) -> None:
    """Of sequences that are in no step."""
    for sequence in sequences:
        account = Account()
        count_tokens(sequence, account)
        accounts.note(sequence.request.share.flow, account)


def note_given_up(sequences: Iterable[Sequence], accounts: Accounts) -> None:
    """Also what was computed of prompts of which nobody was told yet."""
    for sequence in sequences:
        account = Account()
        count_tokens(sequence, account)
        if sequence.sample == 0 and not sequence.is_prompt_charged and sequence.num_computed:
            sequence.is_prompt_charged = True
            account.prompt_tokens += min(sequence.num_computed, sequence.prompt_length)
            account.cached_tokens += min(sequence.num_cached_tokens, account.prompt_tokens)
        accounts.note(sequence.request.share.flow, account)
