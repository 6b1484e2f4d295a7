"""What would complete a bad word, against the definition; and what a token costs."""

from __future__ import annotations

import random

import pytest

from serve_app.engine.sampling.state import BadWords


def by_definition(words: list[tuple[int, ...]], token_ids: list[int], num_generated: int) -> set[int]:
    generated = token_ids[len(token_ids) - num_generated :]
    return {word[-1] for word in words if len(word) == 1 or generated[1 - len(word) :] == list(word[:-1])}


@pytest.mark.parametrize("seed", range(40))
def test_a_token_is_banned_where_it_would_complete_a_word_and_nowhere_else(seed: int) -> None:
    draw = random.Random(seed)
    words = [tuple(draw.choices(range(4), k=draw.randrange(1, 5))) for _ in range(draw.randrange(1, 7))]
    bad_words, token_ids = BadWords(words), draw.choices(range(4), k=5)
    for num_generated in range(40):
        found = bad_words.completions(token_ids, num_generated=num_generated)
        assert found == by_definition(words, token_ids, num_generated)
        token_ids.append(draw.randrange(4))


def test_a_word_that_the_prompt_begins_is_not_completed_by_a_ban() -> None:
    assert BadWords([(1, 2, 3)]).completions([1, 2], num_generated=1) == set()
    assert BadWords([(1, 2, 3)]).completions([1, 2], num_generated=2) == {3}
