"""What a request may come to: every choice of every prompt, at the length that is asked for, and a token per byte."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from serve_app.api.limits import DEFAULT_LIMITS
from serve_app.core.ledger import Price, Prices
from serve_app.core.names import ModelRef
from serve_app.core.tenants import Amount
from serve_app.router.accounting import NUM_SPECIAL, worst_case
from serve_app.router.lower import lower
from tests.fakes import model_card
from tests.parsing import parse_completion

CONTEXT = 100
PRICES = Prices(by_model={"tiny": Price(prompt=1.0, completion=10.0)})
"""Per million tokens: a thousand and ten thousand billionths for each."""


def most(**sent: object) -> Amount:
    body = json.dumps({"model": "tiny", "prompt": "Hello", **sent}).encode()
    request = parse_completion(body, DEFAULT_LIMITS)
    card = replace(model_card("tiny", vocab_size=100), max_model_len=CONTEXT)
    requests = lower(request, "cmpl-1", resolve=lambda wanted: ModelRef(base=wanted.model), card_of=lambda ref: card)
    return worst_case(list(requests), card_of=lambda ref: card, prices=PRICES)[0]


@pytest.mark.parametrize(
    ("sent", "prompt", "completion"),
    [
        ({"max_tokens": 7}, 5, 7),
        ({"max_tokens": 7, "n": 3}, 5, 21),
        ({"max_tokens": 7, "n": 2, "best_of": 4}, 5, 28),
        ({"max_tokens": 7, "prompt": ["Hello", "ab"], "n": 2}, 7 + NUM_SPECIAL, 28),
        ({"max_tokens": 7, "prompt": [1, 2, 3]}, 3, 7),
        ({"max_tokens": 7, "prompt": "привет"}, 12, 7),
        ({"max_tokens": 7, "prompt": "x" * 500}, CONTEXT - NUM_SPECIAL, 7),
        ({"max_tokens": 0, "echo": True, "logprobs": 1}, 5, 0),
        ({"max_tokens": -1}, 5, CONTEXT),
        ({"max_tokens": 5000, "n": 2}, 5, 2 * CONTEXT),
    ],
)
def test_all_that_may_be_generated_is_reserved_and_priced(
    sent: dict[str, object], prompt: int, completion: int
) -> None:
    prompt += NUM_SPECIAL
    tokens, cost = prompt + completion, 1000 * prompt + 10_000 * completion
    assert most(**sent) == Amount(requests=1, tokens=tokens, cost=cost)
