"""Of several completions the likeliest are returned: by mean and renumbered, or by sum under their own indices."""

from __future__ import annotations

import json

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import DIALECTS
from serve_app.api.responses import Choice
from serve_app.router.render import Score, best_choices
from tests.parsing import parse_completion

SCORES = [Score(-3.0, 1), Score(-4.0, 4), Score(), Score(-9.0, 9)]
CHOICES = [Choice(index=index, text=f"text {index}") for index in range(4)]


def request_of(dialect: str, **members: object) -> CompletionRequest:
    body = json.dumps({"model": "tiny", "prompt": "Hello", **members}).encode()
    return parse_completion(body, choose_dialect=lambda model: DIALECTS[dialect])


def test_the_highest_mean_comes_first_and_numbers_begin_anew():
    best = best_choices(request_of("union", n=3, best_of=4), CHOICES, SCORES)
    assert [(choice.index, choice.text) for choice in best] == [(0, "text 1"), (1, "text 3"), (2, "text 0")]


def test_mistral_rs_compares_sums_and_keeps_the_numbers():
    best = best_choices(request_of("mistral.rs", n=4, best_of=2), CHOICES, SCORES)
    assert [(choice.index, choice.text) for choice in best] == [(0, "text 0"), (1, "text 1")]


def test_a_completion_that_shows_no_token_is_behind_all_others():
    for dialect, members in (("union", {"n": 4, "best_of": 4}), ("mistral.rs", {"n": 4, "best_of": 4})):
        assert best_choices(request_of(dialect, **members), CHOICES, SCORES)[-1].text == "text 2"


def test_each_prompt_is_ranked_by_itself():
    request = request_of("union", prompt=["a", "b"], n=1, best_of=2)
    assert [choice.text for choice in best_choices(request, CHOICES, SCORES)] == ["text 1", "text 3"]
    assert [choice.index for choice in best_choices(request, CHOICES, SCORES)] == [0, 1]
