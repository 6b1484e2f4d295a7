"""Decides which guesses a step computes, by how likely they are and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from weakref import WeakKeyDictionary

from serve_app.engine.config import EngineConfig
from serve_app.engine.scheduler.sequence import Batch, Sequence, Span
from serve_app.engine.speculation.guesser import Guesser, Trust

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
