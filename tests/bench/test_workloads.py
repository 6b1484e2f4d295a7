"""What the workloads ask is what they say, and of every server the same."""

from __future__ import annotations

import pytest

from benchmarks.checkpoints import word_tokenizer, words
from benchmarks.workloads import BY_NAME, WORKLOADS, Workload, bodies, warming

WORDS = words()


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.name)
def test_prompts_have_as_many_tokens_as_the_workload_says(workload: Workload) -> None:
    tokenizer = word_tokenizer()
    for body in bodies(workload.shortened(), ["m"], WORDS, seed=1):
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        assert len(prompts) == workload.num_prompts
        assert {len(tokenizer.encode(prompt)) for prompt in prompts} == {workload.prefix + workload.prompt}


def test_every_word_is_one_token_and_comes_back() -> None:
    tokenizer = word_tokenizer()
    assert len(set(WORDS)) == len(WORDS)
    for word in WORDS:
        (token,) = tokenizer.encode(f" {word}")
        assert tokenizer.decode([token]) == f" {word}"


def test_a_round_is_the_same_of_every_server_and_another_of_another_seed() -> None:
    first, again = (bodies(BY_NAME["W2"], ["m"], WORDS, seed=1) for _ in range(2))
    other = bodies(BY_NAME["W2"], ["m"], WORDS, seed=2)
    assert first == again
    prompts = [each["prompt"] for each in [*first, *other]]
    assert len(set(prompts)) == len(prompts)


def test_prompts_of_a_round_share_the_prefix_and_nothing_else() -> None:
    workload = BY_NAME["W5"]
    split = [body["prompt"].split() for body in bodies(workload, ["m"], WORDS, seed=1)]
    assert len({tuple(each[: workload.prefix]) for each in split}) == 1
    assert len({tuple(each[workload.prefix :]) for each in split}) == workload.num_requests


def test_adapters_take_turns() -> None:
    names = [f"lora-{number}" for number in range(8)]
    asked = [body["model"] for body in bodies(BY_NAME["W7b"], names, WORDS, seed=1)]
    assert asked == names * 4


def test_a_list_of_prompts_is_spread_over_requests_for_a_server_that_takes_none() -> None:
    workload = BY_NAME["W6"]
    spread = workload.spread()
    assert (spread.num_output_tokens, spread.concurrency) == (workload.num_output_tokens, 16)
    made = bodies(spread, ["m"], WORDS, seed=1)
    assert [body["prompt"] for body in made] == bodies(workload, ["m"], WORDS, seed=1)[0]["prompt"]


def test_what_one_server_wants_besides_is_in_every_body() -> None:
    made = bodies(BY_NAME["W8"], ["m"], WORDS, seed=1, extra={"ignore_eos": True})
    assert all(body["ignore_eos"] for body in made)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.name)
def test_short_and_warming_rounds_keep_the_company_and_ask_for_no_more(workload: Workload) -> None:
    short, warm = workload.shortened(), warming(workload)
    assert short.concurrency == warm.concurrency == workload.concurrency
    assert workload.concurrency <= short.num_requests <= workload.num_requests or workload.num_requests == 2
    assert warm.num_output_tokens <= short.num_output_tokens <= workload.num_output_tokens
