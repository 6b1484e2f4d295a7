"""The forms that several parameters have, and those that configuration and dialect bound."""

from __future__ import annotations

from serve_app.api.forms.form import Terms
from serve_app.api.forms.numbers import Integer, Real
from serve_app.api.forms.plain import Boolean
from serve_app.api.forms.strings import Strings

MAX_PROBABILITIES = 1024
"""Of `n_probs`, which llama.cpp does not bound; a whole vocabulary for every token would be no answer."""


def _unlimited(terms: Terms) -> str:
    return "; -1 is no limit but the model's context" if terms.dialect.takes_unlimited_tokens else ""


FLAG = Boolean()
COUNT = Integer(low=0)
WINDOW = Integer(low=-1, besides="; -1 is the whole context")
COMPLETIONS = Integer(low=1, high=lambda terms: terms.max_n)
FRACTION = Real(low=0, high=1)
SHARE = Real(above=0, high=1)
PENALTY = Real(low=-2, high=2)
STRENGTH = Real(low=0, high=100)
RATE = Real(above=0, high=100)
CANDIDATES = Integer(low=0, high=lambda terms: terms.max_logprobs)
PROBABILITIES = Integer(low=0, high=lambda terms: max(MAX_PROBABILITIES, terms.max_logprobs))
STOPS = Strings(max_strings=lambda terms: terms.max_stop_strings)
WORDS = Strings(max_strings=lambda terms: terms.limits.max_stop_strings)
PATTERNS = Strings(
    max_strings=lambda terms: terms.limits.max_stop_strings, one="a regular expression", several="of them"
)
LENGTH = Integer(low=lambda terms: terms.dialect.least_max_tokens, besides=_unlimited)
