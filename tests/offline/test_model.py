"""A model in this process answers as a service does."""

from __future__ import annotations

import json
import runpy
import time
from collections.abc import Iterator

import numpy
import pytest

from serve_app.offline.files import COLUMNS, Form
from serve_app.offline.model import LocalModel
from serve_app.offline.run import in_threads
from tests.house.sources import REPOSITORY

FORM = Form(default="demo", parameters={"model": "demo"})


@pytest.fixture(scope="module")
def model() -> Iterator[LocalModel]:
    made = LocalModel({"name": "demo", "path": "builtin:demo", "adapters": "adapters/demo", "threads": 1})
    yield made
    made.close()


@pytest.mark.parametrize(
    ("path", "body", "member"),
    [
        ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 3}, "choices"),
        ("/v1/completions", {"model": "demo:pirate", "prompt": "Once", "max_tokens": 3}, "choices"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}, "choices"),
        ("/v1/embeddings", {"input": "Once"}, "data"),
        ("/v1/responses", {"input": "Once", "max_output_tokens": 2}, "output"),
    ],
)
def test_every_endpoint_of_batches_answers(model: LocalModel, path: str, body: dict[str, object], member: str) -> None:
    answered = model.ask(FORM.question(1, {"url": path, "body": body}), "id-1")
    assert answered.status == 200, answered.body
    assert json.loads(answered.body)[member]


def test_requests_of_many_threads_are_answered_each_by_its_own(model: LocalModel) -> None:
    told: dict[str, str] = {}

    def work(prompt: str) -> None:
        question = FORM.question(1, {"prompt": prompt, "max_tokens": 4, "echo": True, "temperature": 0})
        told[prompt] = json.loads(model.ask(question, prompt).body)["choices"][0]["text"]

    prompts = [f"Story {number}" for number in range(12)]
    in_threads(iter(prompts), work, num_threads=6)
    assert [told[each].startswith(each) and len(told[each]) > len(each) for each in prompts] == [True] * 12


def test_the_replica_hears_of_its_router_again_and_again(model: LocalModel) -> None:
    """It ends what it computes for a router that is silent for `lease_s`. Each greeting brings its card anew."""
    [(card, _)], deadline = model._fleet.replicas, time.monotonic() + 60
    while model._fleet.replicas[0][0] is card:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_refusal_is_an_answer(model: LocalModel) -> None:
    answered = model.ask(FORM.question(1, {"prompt": "a", "max_tokens": -7}), "id-1")
    assert (answered.status, "max_tokens" in answered.body.decode()) == (400, True)


@pytest.mark.slow
def test_the_script_for_ray_data_adds_the_columns_of_answers_to_its_rows() -> None:
    script = runpy.run_path(str(REPOSITORY / "docs" / "ray_data.py"))
    answers = script["Answers"]({"name": "demo", "path": "builtin:demo", "threads": 1}, {"max_tokens": 3})
    rows = {"prompt": numpy.array(["Once", "A cat"], dtype=object), "source": numpy.array([7, 8])}
    found = answers(rows)
    answers._model.close()
    assert [*found] == ["prompt", "source", *COLUMNS]
    assert (found["status"], found["error"]) == ([200, 200], [None, None])
    assert all(json.loads(each)["usage"]["completion_tokens"] for each in found["response"])
