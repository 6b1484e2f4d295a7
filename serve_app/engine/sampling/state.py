"""What sampling remembers of a sequence between tokens. It is about tokens alone, so it survives preemption."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence as Items
from collections.abc import Set

import torch
from torch import Tensor

from serve_app.core.request import DryParams, SamplingParams

LARGEST_EXPONENT = 88.7228391  # ln of the largest float32, as llama.cpp bounds its exponent
LARGEST_PENALTY = 3e38
LEAST_ROOM = 256


class Repeats:
    """Finds earlier places where what a growing list of tokens ends with occurs, too.

    For each place that holds the same token as the end, the length of the longest common suffix of all tokens and of
    those up to that place is known. Of the next end's matches each is one longer than the match one place before it,
    so a step costs a look at each earlier occurrence of the new token and of the last one: few in ordinary text, the
    window at worst, then as a few operations on whole tensors. The first call computes the same numbers at once as the
    Z-function of the reversed window (Gusfield, "Algorithms on Strings, Trees and Sequences", 1997, 1.3).
    """

    def __init__(self, params: DryParams) -> None:
        self._params = params
        self._breakers_by_last: dict[int, list[tuple[int, ...]]] = {}
        for breaker in params.breakers:
            if breaker:
                self._breakers_by_last.setdefault(breaker[-1], []).append(breaker)
        self._lonely_breakers = torch.tensor([breaker[0] for breaker in params.breakers if len(breaker) == 1]).long()
        self._places: dict[int, array[int]] = {}  # where each token occurs
        self._tokens = array("i")  # those taken
        self._lengths = torch.empty(0, dtype=torch.int32)  # of the match that ends one place before; 0 is none
        self._matched = torch.empty(0, dtype=torch.int64)  # one place after the end of each match
        self._own = torch.empty(0, dtype=torch.int32)  # their lengths
        self._num_taken = 0
        self._free_from = 0  # first position after the last breaker

    def catch_up(self, token_ids: Items[int]) -> None:
        """Take what `token_ids` has gained since the last call."""
        self._make_room(len(token_ids))
        if self._num_taken == 0 and token_ids:
            self._begin(token_ids)
        for position in range(self._num_taken, len(token_ids)):
            self._take(token_ids, position)
        self._num_taken = len(token_ids)

    def penalties(self) -> tuple[Tensor, Tensor]:
        """Return what to take from the logit of each token that would continue a repetition; [n] int64, [n] float64"""
        params = self._params
        token_ids, lengths = self._continuations()
        if not len(token_ids):
            return token_ids, lengths.double()
        exponents = (lengths - params.allowed_length).double()
        if params.base > 1.000001:
            exponents.clamp_(max=int(LARGEST_EXPONENT / math.log(params.base)))
        charged = params.multiplier * torch.pow(params.base, exponents)
        return token_ids, charged.clamp_(max=LARGEST_PENALTY)

    def _continuations(self) -> tuple[Tensor, Tensor]:
        """Return tokens that would continue penalised runs, and the longest run of each."""
        begin = self._window_begin(self._num_taken)
        limit = self._num_taken - max(begin, self._free_from)
        shortest = max(self._params.allowed_length, 1)
        nothing = torch.empty(0, dtype=torch.int64)
        if limit < shortest or not len(self._matched):
            return nothing, nothing
        if int(self._own.amax()) < shortest:  # as in ordinary text
            return nothing, nothing
        lengths = torch.minimum(self._own.long(), self._matched - begin).clamp_(max=limit)
        is_penalised = lengths >= shortest
        tokens = torch.frombuffer(self._tokens, dtype=torch.int32)
        return self._longest(tokens[self._matched[is_penalised]].long(), lengths[is_penalised])

    def _longest(self, token_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token once, with its greatest length; leave out breakers."""
        if not len(token_ids):
            return token_ids, lengths
        ranks = (lengths << 32) + torch.arange(len(lengths))  # no two are equal
        best = torch.zeros(int(token_ids.max()) + 1, dtype=torch.int64).scatter_reduce_(0, token_ids, ranks, "amax")
        best[self._lonely_breakers[self._lonely_breakers < len(best)]] = 0
        chosen = torch.nonzero(best[token_ids] == ranks)[:, 0]
        return token_ids[chosen], lengths[chosen]

    def _begin(self, token_ids: Items[int]) -> None:
        """Take all tokens at once; those before the window never matter."""
        begin, last = self._window_begin(len(token_ids)), len(token_ids) - 1
        recent = token_ids[begin:]
        for position, token_id in enumerate(recent, begin):
            if (places := self._places.get(token_id)) is None:
                self._places[token_id] = array("q", (position,))
            else:
                places.append(position)
        self._tokens.extend(token_ids)
        lengths = torch.tensor(z_function(recent[::-1])[:0:-1], dtype=torch.int32)  # of matches that end at begin, ...
        self._lengths[begin + 1 : last + 1] = lengths
        found = torch.nonzero(lengths)[:, 0]
        self._matched, self._own = found + begin + 1, lengths[found]
        ends = (end for end in range(last, begin - 1, -1) if self._ends_breaker(token_ids, end))
        self._free_from = next(ends, -1) + 1
        self._num_taken = len(token_ids)

    def _take(self, token_ids: Items[int], position: int) -> None:
        token_id = token_ids[position]
        places = self._places.setdefault(token_id, array("q"))
        self._follow(_tail(places, self._window_begin(position + 1)))
        places.append(position)
        self._tokens.append(token_id)
        if self._ends_breaker(token_ids, position):
            self._free_from = position + 1

    def _follow(self, earlier: Tensor) -> None:
        """Let the matches end at these places, [n]; those there, one place on, are one longer."""
        before = self._matched
        if len(earlier):
            self._own = self._lengths.index_select(0, earlier).add_(1)
        if len(before):
            self._lengths.index_fill_(0, before, 0)
        self._matched = earlier.add_(1)
        if len(earlier):
            self._lengths.index_copy_(0, earlier, self._own)

    def _make_room(self, num_tokens: int) -> None:
        """Make room for the lengths of so many tokens: twice the memory if there is none."""
        missing = num_tokens + 1 - len(self._lengths)
        if missing > 0:
            more = torch.zeros(max(missing, len(self._lengths), LEAST_ROOM), dtype=torch.int32)
            self._lengths = torch.cat((self._lengths, more))

    def _window_begin(self, end: int) -> int:
        return 0 if self._params.window is None else max(0, end - self._params.window)

    def _ends_breaker(self, token_ids: Items[int], position: int) -> bool:
        return any(
            position + 1 >= len(breaker) and tuple(token_ids[position + 1 - len(breaker) : position + 1]) == breaker
            for breaker in self._breakers_by_last.get(token_ids[position], ())
        )


def _tail(places: array[int], begin: int) -> Tensor:
    """Copy the rising numbers from `begin` on; [n] int64"""
    first = bisect_left(places, begin)
    if first == len(places):
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(places, dtype=torch.int64, offset=first * places.itemsize).clone()


def z_function(items: Items[int]) -> list[int]:
    """Return for each place the length of the common prefix of `items` and `items[place:]`; 0 for place 0."""
    size = len(items)
    lengths = [0] * size
    left = right = 0  # the known match that reaches farthest is items[left:right]
    for place in range(1, size):
        length = min(right - place, lengths[place - left]) if place < right else 0
        while place + length < size and items[length] == items[place + length]:
            length += 1
        lengths[place] = length
        if place + length > right:
            left, right = place, place + length
    return lengths


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
