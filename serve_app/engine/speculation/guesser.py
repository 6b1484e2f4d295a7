"""Follows what one sequence seems to copy: its prompt, itself, or what its client predicted.

Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with Reference", arXiv 2304.04487): what
followed the last few tokens where they occurred before is likely to follow now.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items

from serve_app.engine.speculation.ngrams import Ngrams
from serve_app.engine.speculation.trust import Trust, level_of

SIZES = (5, 3, 2)
"""Of the runs that are looked for, the longest first; what goes on matching is followed and not looked for again."""
PREDICTED = 8
"""A prediction's beginning counts as a match of so many tokens."""


class Guesser:
    """Of one sequence; its state is about tokens alone, and preemption leaves it as it is.

    prediction: tokens that the client expects; they count as if they stood before the prompt
    trust:      how often its guesses came true
    """

    def __init__(self, prediction: Items[int], trust: Trust) -> None:
        self.trust = trust
        self._tokens = array("i", prediction)
        self._num_predicted = len(prediction)
        self._num_taken = 0
        self._ngrams = [Ngrams(size) for size in SIZES]
        self._follows: int | None = None  # the place of the token that is guessed to come next
        self._num_matched = 0

    @property
    def num_matched(self) -> int:
        """How many tokens before the guess are those before its source, at least."""
        return self._num_matched

    @property
    def is_prediction(self) -> bool:
        """Whether what would be guessed is the client's prediction."""
        return self._follows is not None and self._follows < self._num_predicted

    def catch_up(self, token_ids: Items[int], prompt_length: int) -> None:
        """Take what `token_ids` has gained since the last call, and see which guesses came true."""
        if self._num_taken < prompt_length:
            self._tokens.extend(token_ids[:prompt_length])
            self._num_taken = prompt_length
            if self._num_predicted:
                self._follows, self._num_matched = 0, PREDICTED
            else:
                self._look()
        for token_id in token_ids[self._num_taken :]:
            self._take(token_id)
        self._num_taken = len(token_ids)

    def guess(self, count: int) -> tuple[int, ...]:
        """What comes next, at most `count` tokens; may reach into itself, as of a text that goes round in circles."""
        if self._follows is None:
            return ()
        begin, size = self._follows, len(self._tokens)
        end = min(begin + count, self._num_predicted if self.is_prediction else begin + count)
        found = list(self._tokens[begin:end])
        while len(found) < end - begin:
            found.append(found[len(found) - (size - begin)])
        return tuple(found)

    def _take(self, token_id: int) -> None:
        if self._follows is not None:
            is_hit = self._tokens[self._follows] == token_id
            self.trust.note(level_of(self._num_matched), is_hit=is_hit)
            self._go_on(is_hit=is_hit)
        self._tokens.append(token_id)
        self._look()

    def _go_on(self, *, is_hit: bool) -> None:
        """Follow by one token; behind one that differs it may still go on as before, which is believed once."""
        assert self._follows is not None, "nothing is followed"
        if not is_hit and self._num_matched == 0:
            self._follows = None
            return
        ends_prediction = self._follows + 1 == self._num_predicted
        self._follows = None if ends_prediction else self._follows + 1
        self._num_matched = self._num_matched + 1 if is_hit and not ends_prediction else 0

    def _look(self) -> None:
        """Follow what matches more of the end than what is followed now; then the end can be found, too."""
        for ngrams in self._ngrams:
            ngrams.add(self._tokens, len(self._tokens) - 1)
        for ngrams in self._ngrams:
            if ngrams.size <= self._num_matched:
                return
            if (found := ngrams.find(self._tokens)) is not None:
                self._follows, self._num_matched = found, ngrams.size
                return
