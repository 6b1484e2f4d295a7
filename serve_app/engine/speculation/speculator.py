"""Guesses the next tokens of sequences, and decides which guesses a step computes, by chance and cost.

Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with Reference", arXiv 2304.04487): what
followed the last few tokens where they occurred before is likely to follow now.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from serve_app.engine.config import EngineConfig
from serve_app.engine.scheduler.sequence import Batch, Sequence, Span

SIZES = (5, 3, 2)
"""Of the runs that are looked for, the longest first; what goes on matching is followed and not looked for again."""
PREDICTED = 8
"""A prediction's beginning counts as a match of so many tokens."""
FIRST_CHANCES = (0.3, 0.3, 0.3, 0.5, 0.7, 0.8)
"""By level, before anything was seen: what prompts of prose and code gave, rounded down."""
FIRST_WEIGHT = 8.0
SHARED_WEIGHT = 4.0
"""How many guesses of its own outweigh what all sequences before a sequence have told."""
MEMORY = 0.9
SHARED_MEMORY = 0.995
"""What a further guess leaves of the counts before it: of a sequence's, and of all sequences'."""
FACTOR = 0x2C1B3C6D  # of the hash of a run; below 2**31, so that a torch product of it with 32 bits keeps to 63
LOW = 0xFFFFFFFF
LEAST_SLOTS = 256
MOST_SLOTS = 1 << 17
"""Half a mebibyte; of a longer list, what was seen long ago is forgotten as newer tokens take its slots."""
SLOTS_PER_TOKEN = 2


class Guesser:
    """Guesses for one sequence. Its state is about tokens alone, and preemption leaves it as it is.

    prediction: tokens that the client expects; they count as if they stood before the prompt
    trust:      how often its guesses came true
    num_matched: tokens before the guess that are those before its source, at least
    """

    def __init__(self, prediction: Items[int], trust: Trust) -> None:
        self.trust = trust
        self._tokens = array("i", prediction)
        self._num_predicted = len(prediction)
        self._num_taken = 0
        self._ngrams = [Ngrams(size) for size in SIZES]
        self._follows: int | None = None  # the place of the token that is guessed to come next
        self.num_matched = 0

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
                self._follows, self.num_matched = 0, PREDICTED
            else:
                self._look()
        for token_id in token_ids[self._num_taken :]:
            self._take(token_id)
        self._num_taken = len(token_ids)

    def guess(self, count: int) -> tuple[int, ...]:
        """Return what comes next, at most `count` tokens; may reach into itself, as in a text that repeats itself."""
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
            self.trust.note(level_of(self.num_matched), is_hit=is_hit)
            self._go_on(is_hit=is_hit)
        self._tokens.append(token_id)
        self._look()

    def _go_on(self, *, is_hit: bool) -> None:
        """Follow by one token; behind one that differs it may still go on as before, which is believed once."""
        assert self._follows is not None, "nothing is followed"
        if not is_hit and self.num_matched == 0:
            self._follows = None
            return
        ends_prediction = self._follows + 1 == self._num_predicted
        self._follows = None if ends_prediction else self._follows + 1
        self.num_matched = self.num_matched + 1 if is_hit and not ends_prediction else 0

    def _look(self) -> None:
        """Follow what matches more of the end than what is followed now; then the end can be found, too."""
        for ngrams in self._ngrams:
            ngrams.add(self._tokens, len(self._tokens) - 1)
        for ngrams in self._ngrams:
            if ngrams.size <= self.num_matched:
                return
            if (found := ngrams.find(self._tokens)) is not None:
                self._follows, self.num_matched = found, ngrams.size
                return


def level_of(num_matched: int) -> int:
    """Return the level by powers of two: 0, 1, 2 to 3, 4 to 7, 8 to 15, and more."""
    return min(num_matched.bit_length(), len(FIRST_CHANCES) - 1)


class Trust:
    """Counts hits and misses, old ones for less. A sequence's begins with what its engine's has learned.

    Every guess counts, computed or not: whether a token was guessed is known once it is drawn. So nothing has to be
    tried to be trusted again, and a text whose guesses miss costs nothing but the looking.
    """

    def __init__(self, shared: Trust | None = None) -> None:
        self._shared = shared
        self._memory = SHARED_MEMORY if shared is None else MEMORY
        self._hits = [0.0] * len(FIRST_CHANCES)
        self._tries = [0.0] * len(FIRST_CHANCES)

    def note(self, level: int, *, is_hit: bool) -> None:
        self._hits[level] = self._hits[level] * self._memory + is_hit
        self._tries[level] = self._tries[level] * self._memory + 1.0
        if self._shared is not None:
            self._shared.note(level, is_hit=is_hit)

    def chance(self, level: int) -> float:
        """Return the chance that the next token is the guessed one, in (0, 1)."""
        if self._shared is None:
            before, weight = FIRST_CHANCES[level], FIRST_WEIGHT
        else:
            before, weight = self._shared.chance(level), SHARED_WEIGHT
        return (self._hits[level] + before * weight) / (self._tries[level] + weight)

    def chances(self, num_matched: int, count: int) -> Items[float]:
        """Return the chances that the first 1, 2, … `count` tokens of a guess all come true."""
        found, together = [], 1.0
        for offset in range(count):
            together *= self.chance(level_of(num_matched + offset))
            found.append(together)
        return found


class Ngrams:
    """The latest place of each run of `size` tokens, in a table that a newer run overwrites: a look-up costs one look.

    What is found is compared, so a slot that two runs share costs a match at most. A token costs one write; the table
    doubles with the tokens, which is one pass of torch over them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._ends = array("i", bytes(4 * LEAST_SLOTS))  # by slot, one place behind a run; 0 is none
        self._num_added = 0

    def add(self, tokens: array[int], end: int) -> None:
        """Add the runs that end up to `end`; none was left out before."""
        if SLOTS_PER_TOKEN * end > len(self._ends) < MOST_SLOTS or end - self._num_added > LEAST_SLOTS:
            self._rebuild(tokens, end)
        else:
            for place in range(max(self._num_added + 1, self.size), end + 1):
                self._ends[self._slot(tokens, place)] = place
        self._num_added = end

    def find(self, tokens: array[int]) -> int | None:
        """Return the place behind the latest run that was added and that equals the last tokens."""
        end, size = len(tokens), self.size
        if end < size:
            return None
        found = self._ends[self._slot(tokens, end)]
        if found == 0 or found == end or tokens[found - size : found] != tokens[end - size : end]:
            return None
        return found

    def _slot(self, tokens: array[int], end: int) -> int:
        number = 0
        for token_id in tokens[end - self.size : end]:
            number = (number * FACTOR + token_id) & LOW
        return (number ^ (number >> 15)) & (len(self._ends) - 1)

    def _rebuild(self, tokens: array[int], end: int) -> None:
        """Add all runs at once, into a table of the size that they need."""
        num_slots = LEAST_SLOTS
        while num_slots < min(SLOTS_PER_TOKEN * end, MOST_SLOTS):
            num_slots *= 2
        self._ends = array("i", bytes(4 * num_slots))
        count = end - self.size + 1
        if count <= 0:
            return
        every = torch.frombuffer(tokens, dtype=torch.int32, count=end).long()
        numbers = torch.zeros(count, dtype=torch.int64)
        for offset in range(self.size):
            numbers = (numbers * FACTOR + every[offset : offset + count]) & LOW
        slots = (numbers ^ (numbers >> 15)) & (num_slots - 1)
        places = torch.arange(self.size, end + 1, dtype=torch.int32)
        torch.frombuffer(self._ends, dtype=torch.int32).scatter_reduce_(0, slots, places, "amax")


LOOKING_S, LOOKING_SEQUENCE_S = 70e-6, 20e-6
"""What it takes to look for guesses in a step, and for each of its sequences, measured in a running engine on a CPU."""
MOST_LOOKING = 0.03
"""Of a step; where looking would take more nothing is looked for, as it is spent whether anything is found or not."""
LEAST_GAIN = 1.05
"""What a step with guesses has to promise over one without; less is lost in what cannot be foreseen."""
MOST_LOSS = 1.1
"""How many times as long a sequence may wait for a token because of what is guessed for others."""
FIRST_SHARE = 0.1
"""Of a sequence's share of a step, what one guess is taken to cost before any was measured."""
RISE, FALL = 0.2, 0.5
"""How far an estimate follows a measurement; what is dearer than thought is often somebody else's work."""
FADING = 0.998
"""Where guesses are too dear they are not measured; after hundreds of steps the price is asked again."""
PLAIN_EVERY = 32
"""So many steps with guesses are followed by one without, so that what they are compared with is not out of date."""


class Speculator:
    """Keeps a guesser for each sequence that may be guessed for, as long as that lives.

    max_draft: guesses of one sequence in one step; 0 is none
    costs: of the steps that were made
    end_token_ids: behind which no text goes on
    """

    def __init__(self, config: EngineConfig, end_token_ids: frozenset[int]) -> None:
        self._guesses_always = config.speculation == "prompt_lookup"
        self.max_draft = 0 if config.speculation == "none" else config.max_draft_tokens
        self._end_token_ids = end_token_ids
        self._trust = Trust()
        self.costs = StepCosts()
        self._guessers: WeakKeyDictionary[Sequence, Guesser] = WeakKeyDictionary()

    def extend(self, spans: list[Span], most: int, *, reserve: Callable[[Sequence, int], bool]) -> list[Span]:
        """Give the spans of a step without prompts the guesses that pay, at most so many. Changes no sequence.

        reserve: makes room for so many tokens of a sequence; False where that would be at another's cost
        """
        plain_s = self.costs.plain_s(len(spans)) if self.max_draft else None
        if plain_s is None or LOOKING_S + LOOKING_SEQUENCE_S * len(spans) > MOST_LOOKING * plain_s:
            return spans
        wanting = [span for span in spans if self._may_guess(span)]
        guessers = {id(span.sequence): self._caught_up(span.sequence) for span in wanting}
        drafts = {name: self._draft(span, guessers[name]) for span in wanting for name in [id(span.sequence)]}
        chances = {name: guessers[name].trust.chances(guessers[name].num_matched, len(drafts[name])) for name in drafts}
        lengths = self._lengths(chances, num_sequences=len(spans), plain_s=plain_s, most=most)
        extended = []
        for span in spans:
            sequence, length = span.sequence, lengths.get(id(span.sequence), 0)
            has_room = length > 0 and reserve(sequence, sequence.num_tokens + length)
            extended.append(replace(span, draft=drafts[id(sequence)][:length]) if has_room else span)
        return extended

    def note(self, batch: Batch, seconds: float) -> None:
        """Learn from a step what one takes; seconds as `work_clock` counts them."""
        if self.max_draft and batch.num_prompt_tokens == 0:
            self.costs.note(batch.num_decoding, batch.num_guesses, seconds)

    def _may_guess(self, span: Span) -> bool:
        """Return whether it is a single token of a sequence that goes on, and of which nothing is kept but its text."""
        sequence = span.sequence
        is_single = span.decodes and span.samples and span.length == 1 and not span.scores
        is_wanted = self._guesses_always or bool(sequence.prediction)
        return is_single and is_wanted and sequence.record is None and self._most(sequence) > 0

    def _most(self, sequence: Sequence) -> int:
        """Return how many guesses could be of use: one token more is drawn than was guessed."""
        return min(self.max_draft, sequence.max_tokens - sequence.num_generated - 1)

    def _caught_up(self, sequence: Sequence) -> Guesser:
        guesser = self._guessers.get(sequence)
        if guesser is None:
            guesser = self._guessers[sequence] = Guesser(sequence.prediction, Trust(self._trust))
        guesser.catch_up(sequence.token_ids, sequence.prompt_length)
        return guesser

    def _draft(self, span: Span, guesser: Guesser) -> tuple[int, ...]:
        """Return guesses up to where the text would end: the end itself is drawn behind the rest."""
        guess = guesser.guess(self._most(span.sequence))
        stop = span.sequence.request.stop
        ends = stop.token_ids if stop.ignore_eos else self._end_token_ids.union(stop.token_ids)
        end = next((place for place, token_id in enumerate(guess) if token_id in ends), len(guess))
        return guess[:end]

    def _lengths(
        self, chances: dict[int, Items[float]], *, num_sequences: int, plain_s: float, most: int
    ) -> dict[int, int]:
        """Return how many guesses of each sequence make the most tokens per second, the likeliest before the others.

        Nobody waits much longer for a token than without: not who has no guesses, nor who has few.

        A guess is worth the chance that it and all before it are drawn, which falls along a draft; so the best so many
        guesses are the likeliest ones, and none is among them without those before it.
        """
        ranked = sorted(((chance, name) for name, each in chances.items() for chance in each), reverse=True)[:most]
        best, best_rate, tokens = 0, LEAST_GAIN * num_sequences / plain_s, float(num_sequences)
        own: dict[int, float] = {}
        for count, (chance, name) in enumerate(ranked, 1):
            tokens += chance
            own[name] = own.get(name, 1.0) + chance
            least = 1.0 if len(own) < num_sequences else min(own.values())
            taken_s = plain_s + self.costs.extra_s(num_sequences, count)
            if taken_s <= MOST_LOSS * least * plain_s and tokens / taken_s > best_rate:
                best, best_rate = count, tokens / taken_s
        if ranked and not best:
            self.costs.fade(num_sequences)
        lengths: dict[int, int] = {}
        for _, name in ranked[:best]:
            lengths[name] = lengths.get(name, 0) + 1
        return lengths


class StepCosts:
    """Estimates what steps take by powers of two of sequences and guesses; needs no model of the machine."""

    def __init__(self) -> None:
        self._plain_s: dict[int, float] = {}
        self._guess_s: dict[tuple[int, int], float] = {}  # of one guess
        self._since_plain: dict[int, int] = {}

    def note(self, num_sequences: int, num_guesses: int, seconds: float) -> None:
        """Learn from a step that computed no prompt."""
        size = num_sequences.bit_length()
        if num_guesses == 0:
            self._plain_s[size] = _moved(self._plain_s.get(size), seconds)
            self._since_plain[size] = 0
            return
        self._since_plain[size] = self._since_plain.get(size, 0) + 1
        if (plain_s := self._plain_s.get(size)) is not None:
            cell = size, num_guesses.bit_length()
            self._guess_s[cell] = _moved(self._guess_s.get(cell), max(seconds - plain_s, 0.0) / num_guesses)

    def plain_s(self, num_sequences: int) -> float | None:
        """Return the seconds of a step without guesses; None if one has to be made first."""
        size = num_sequences.bit_length()
        return None if self._since_plain.get(size, 0) >= PLAIN_EVERY else self._plain_s.get(size)

    def extra_s(self, num_sequences: int, num_guesses: int) -> float:
        """Return what so many guesses add, by the nearest number that was seen; only if `plain_s` is known."""
        size, guesses = num_sequences.bit_length(), num_guesses.bit_length()
        seen = [(abs(known[1] - guesses), price) for known, price in self._guess_s.items() if known[0] == size]
        price = min(seen)[1] if seen else FIRST_SHARE * self._plain_s[size] / num_sequences
        return num_guesses * price

    def fade(self, num_sequences: int) -> None:
        """Lower a little what guesses are taken to cost beside so many sequences."""
        for cell in self._guess_s:
            if cell[0] == num_sequences.bit_length():
                self._guess_s[cell] *= FADING


def _moved(before: float | None, now: float) -> float:
    return now if before is None else before + (RISE if now > before else FALL) * (now - before)
