"""What a step takes with guesses in it and without, as it was measured."""

from __future__ import annotations

FIRST_SHARE = 0.1
"""Of a sequence's share of a step, what one guess is taken to cost before any was measured."""
RISE, FALL = 0.2, 0.5
"""How far an estimate follows a measurement; what is dearer than thought is often somebody else's work."""
FADING = 0.998
"""Where guesses are too dear they are not measured; after hundreds of steps the price is asked again."""
PLAIN_EVERY = 32
"""So many steps with guesses are followed by one without, so that what they are compared with is not out of date."""


class StepCosts:
    """Estimates by the number of sequences and of guesses, each by powers of two: no model of the machine is needed."""

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
        """Of a step without guesses; None where one has to be made first."""
        size = num_sequences.bit_length()
        return None if self._since_plain.get(size, 0) >= PLAIN_EVERY else self._plain_s.get(size)

    def extra_s(self, num_sequences: int, num_guesses: int) -> float:
        """What so many guesses add to it; only where that is known. Of the nearest number that was seen."""
        size, guesses = num_sequences.bit_length(), num_guesses.bit_length()
        seen = [(abs(known[1] - guesses), price) for known, price in self._guess_s.items() if known[0] == size]
        price = min(seen)[1] if seen else FIRST_SHARE * self._plain_s[size] / num_sequences
        return num_guesses * price

    def fade(self, num_sequences: int) -> None:
        """Believe a little less in what guesses cost beside so many sequences."""
        for cell in self._guess_s:
            if cell[0] == num_sequences.bit_length():
                self._guess_s[cell] *= FADING


def _moved(before: float | None, now: float) -> float:
    return now if before is None else before + (RISE if now > before else FALL) * (now - before)
