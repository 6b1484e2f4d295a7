"""How a sequence ends by its tokens: end tokens, stop tokens, and the least number of tokens before either."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.core.delta import Finish, FinishReason
from serve_app.core.prompt import Prompt
from serve_app.core.request import GenerationRequest, LogprobParams, StopParams
from serve_app.engine.engine import Engine
from tests.engine.conftest import DEMO
from tests.engine.harness import Outcome, complete, config, make_engine, request

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(config(DEMO))


def run(engine: Engine, stop: StopParams, *, logprobs: LogprobParams | None = None) -> Outcome:
    prompt = engine.tokenizer.encode(Prompt(parts=("Once upon a time",)))  # type: ignore[attr-defined]
    asked: GenerationRequest = replace(request("one", logprobs=logprobs), stop=stop)
    return complete(engine, [(asked, prompt)])["one", 0]


def finish(outcome: Outcome) -> Finish:
    found = outcome.deltas[-1].finish
    assert found is not None
    return found


def end_on(token_id: int) -> Engine:
    """An engine with that token as the model's end token."""
    return make_engine(config(DEMO), eos_token_ids=frozenset([token_id]))


@pytest.fixture
def ending(engine: Engine) -> tuple[Engine, list[int], str]:
    """An engine whose end token is the fifth of a greedy text, with that text's tokens and their first four's text."""
    free = run(engine, StopParams(max_tokens=20))
    assert len(free.token_ids) == 20
    place = next(i for i in range(4, 20) if free.token_ids[i] not in free.token_ids[:i])
    shown = run(engine, StopParams(max_tokens=place)).text
    return end_on(free.token_ids[place]), free.token_ids[: place + 1], shown


def test_the_end_token_ends_and_is_not_shown(ending: tuple[Engine, list[int], str]) -> None:
    engine, tokens, shown = ending
    outcome = run(engine, StopParams(max_tokens=20))
    assert (outcome.token_ids, outcome.text) == (tokens, shown)
    assert finish(outcome) == Finish(reason=FinishReason.STOP, matched_stop=tokens[-1], num_tokens=len(tokens))


def test_an_ignored_end_token_is_drawn_shown_and_ends_nothing(ending: tuple[Engine, list[int], str]) -> None:
    engine, tokens, shown = ending
    outcome = run(engine, StopParams(max_tokens=20, ignore_eos=True))
    assert outcome.token_ids[: len(tokens)] == tokens
    assert len(outcome.token_ids) == 20
    assert finish(outcome).reason is FinishReason.LENGTH
    assert outcome.text.startswith(shown)
    assert len(outcome.text) > len(shown)


def test_a_stop_token_ends_even_where_end_tokens_are_ignored(ending: tuple[Engine, list[int], str]) -> None:
    engine, tokens, shown = ending
    stop = StopParams(max_tokens=20, ignore_eos=True, token_ids=(tokens[-1],))
    outcome = run(engine, stop, logprobs=LogprobParams())
    assert (outcome.token_ids, outcome.text) == (tokens, shown)
    assert finish(outcome) == Finish(reason=FinishReason.STOP, matched_stop=tokens[-1], num_tokens=len(tokens))
    assert len(outcome.logprobs) == len(tokens)  # its own entry too, though its text is not shown


def test_before_the_least_number_of_tokens_nothing_that_would_end_it_is_drawn(
    ending: tuple[Engine, list[int], str],
) -> None:
    engine, tokens, _ = ending
    outcome = run(engine, StopParams(max_tokens=20, min_tokens=12, token_ids=(tokens[2],)))
    assert len(outcome.token_ids) >= 12
    assert tokens[-1] not in outcome.token_ids[:12]
    assert tokens[2] not in outcome.token_ids[:12]
    assert outcome.token_ids[:2] == tokens[:2]


def test_the_least_number_is_reached_by_the_token_that_may_then_end_it(ending: tuple[Engine, list[int], str]) -> None:
    engine, tokens, _ = ending
    assert run(engine, StopParams(max_tokens=20, min_tokens=len(tokens) - 1)).token_ids == tokens
    assert run(engine, StopParams(max_tokens=20, min_tokens=len(tokens))).token_ids != tokens


def test_a_stop_string_before_the_least_number_of_tokens_is_ordinary_text(engine: Engine) -> None:
    free = run(engine, StopParams(max_tokens=20)).text
    stop = free[3:6]
    early = run(engine, StopParams(max_tokens=20, strings=(stop,)))
    assert early.text == free[: free.index(stop)]
    least = finish(early).num_tokens + 1
    late = run(engine, StopParams(max_tokens=20, min_tokens=least, strings=(stop,)))
    assert len(late.token_ids) >= least
    assert late.text.startswith(free[: free.index(stop) + len(stop)])
    again = free.find(stop, len(run(engine, StopParams(max_tokens=least - 1)).text))
    assert late.text == (free if again < 0 else free[:again])
