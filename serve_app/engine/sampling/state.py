"""What sampling remembers of a sequence between tokens. It is about tokens alone, so it survives preemption."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence as Items
from collections.abc import Set

import torch
from torch import Tensor

from serve_app.core.request import SamplingParams
from serve_app.engine.sampling.repeats import Repeats


class SamplingState:
    """What sampling remembers of one sequence. Parts that its parameters leave off are None.

    repetition: tokens that the repetition penalty sees
    occurrence: tokens that the presence and frequency penalties see
    repeats:    what DRY sees
    bias_ids, bias: tokens and what is added to their logits, [n] each
    allowed_ids: the only tokens that are ever drawn, [n]
    biased, allowed: the same ids, to ask for one of them; `allowed` is empty where all are
    bad_words:  what is not to be generated
    mu:         Mirostat's bound on surprise, in bits; twice the target at first
    """

    def __init__(self, params: SamplingParams, prompt_length: int) -> None:
        has_penalties = "penalties" in params.samplers
        self.repetition: TokenCounts | None = None
        self.occurrence: TokenCounts | None = None
        self.repeats: Repeats | None = None
        if has_penalties and params.repetition_penalty != 1.0:
            sees_prompt = params.penalty_window is not None or params.repetition_sees_prompt
            self.repetition = TokenCounts(begin=0 if sees_prompt else prompt_length, window=params.penalty_window)
        if has_penalties and (params.presence_penalty or params.frequency_penalty):
            begin = 0 if params.penalty_window is not None else prompt_length
            self.occurrence = TokenCounts(begin=begin, window=params.penalty_window)
        if params.dry is not None and params.dry.multiplier and "dry" in params.samplers:
            self.repeats = Repeats(params.dry)
        bias = _added_up(params.logit_bias)
        self.biased = frozenset(bias)
        self.bias_ids = torch.tensor(list(bias), dtype=torch.int64)
        self.bias = torch.tensor(list(bias.values()), dtype=torch.float32)
        allowed = params.allowed_token_ids
        self.allowed = frozenset(allowed)
        self.allowed_ids = torch.tensor(allowed, dtype=torch.int64) if allowed else None
        self.bad_words = BadWords(params.bad_words) if params.bad_words else None
        self.mu = 2.0 * params.mirostat_tau

    def catch_up(self, token_ids: Items[int]) -> None:
        """Take the tokens that were appended since the last call; prompt and output."""
        for part in (self.repetition, self.occurrence, self.repeats):
            if part is not None:
                part.catch_up(token_ids)


def _added_up(bias: Items[tuple[int, float]]) -> dict[int, float]:
    """Return one addend per token."""
    total: dict[int, float] = {}
    for token_id, addend in bias:
        total[token_id] = total.get(token_id, 0.0) + addend
    return total


class TokenCounts:
    """Counts over a growing list of tokens, from position `begin` on, or over its last `window` tokens.

    A step costs what was added and what left the window; the tensors are one copy of memory.
    """

    def __init__(self, *, begin: int = 0, window: int | None = None) -> None:
        self._begin = begin
        self._end = begin
        self._window = window
        self._place: dict[int, int] = {}
        self._ids = array("q")
        self._counts = array("f")

    def catch_up(self, token_ids: Items[int]) -> None:
        """Count what `token_ids` has gained since the last call."""
        end = len(token_ids)
        begin = self._begin if self._window is None else max(self._begin, end - self._window)
        for token_id in token_ids[self._begin : min(begin, self._end)]:
            self._remove(token_id)
        for token_id, count in Counter(token_ids[max(begin, self._end) : end]).items():
            self._add(token_id, count)
        self._begin, self._end = begin, end

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def token_ids(self) -> Tensor:
        """[n] int64, each token seen once, in no particular order."""
        return torch.frombuffer(self._ids, dtype=torch.int64).clone() if self._ids else torch.empty(0).long()

    @property
    def counts(self) -> Tensor:
        """[n] float32, beside `token_ids`."""
        return torch.frombuffer(self._counts, dtype=torch.float32).clone() if self._counts else torch.empty(0)

    def _add(self, token_id: int, count: int) -> None:
        place = self._place.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0.0)
        self._counts[place] += count

    def _remove(self, token_id: int) -> None:
        place = self._place[token_id]
        self._counts[place] -= 1.0
        if self._counts[place] == 0.0:  # the last one moves into the gap
            last_id, last_count = self._ids.pop(), self._counts.pop()
            if last_id != token_id:
                self._ids[place], self._counts[place] = last_id, last_count
                self._place[last_id] = place
            del self._place[token_id]


class BadWords:
    """Token sequences whose last token is banned after the others.

    A token costs the words that could end there, not all of them.
    """

    def __init__(self, words: Items[tuple[int, ...]]) -> None:
        self._alone = frozenset(word[0] for word in words if len(word) == 1)
        self._by_before: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in words:
            if len(word) > 1:
                self._by_before[word[-2]].append(word)

    def completions(self, token_ids: Items[int], *, num_generated: int) -> Set[int]:
        """Return tokens that would complete a word which was begun in the last `num_generated` of the tokens."""
        if not num_generated or token_ids[-1] not in self._by_before:
            return self._alone
        return self._alone.union(
            word[-1]
            for word in self._by_before[token_ids[-1]]
            if len(word) - 1 <= num_generated and tuple(token_ids[1 - len(word) :]) == word[:-1]
        )
