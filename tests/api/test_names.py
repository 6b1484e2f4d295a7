"""Which models and adapters a request names, and how much of each."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.api.limits import WireLimits
from tests.api.test_parse import parse, refusal


@pytest.mark.parametrize(
    ("members", "field", "parsed"),
    [
        ({"lora": [{"id": 1, "scale": -0.5}, {"id": 0, "scale": 2}]}, "lora", ((1, -0.5), (0, 2.0))),
        ({"lora": [{"id": 1, "scale": 1}, {"id": 1, "scale": 0.25}]}, "scales", {1: 0.25}),
        ({"lora": [{"id": 1, "scale": 1}, {"id": 2, "scale": 1}, {"id": 1, "scale": 0}]}, "scales", {2: 1.0}),
        ({"lora": [{"id": 1, "scale": 0}], "adapter": "a"}, "scales", {}),
        ({"adapter": "sql*0.5"}, "adapter", "sql*0.5"),
        ({"model": ["a", "b:c"]}, "model", "a,b:c"),
        ({"model": ["a"]}, "listed", ("a",)),
        ({"model": "a,b"}, "models", ("a,b",)),
    ],
)
def test_models_and_adapters_are_read_as_they_were_sent(members: dict[str, Any], field: str, parsed: object) -> None:
    assert getattr(parse(**members), field) == parsed


@pytest.mark.parametrize(
    ("members", "param", "message"),
    [
        ({"model": ["tiny"] * 17}, "model", "a list of 1 to 16 of them; found 17 elements"),
        ({"model": {"tiny": 1}}, "model", "a non-empty string"),
        ({"model": ["a", ""]}, "model[1]", "a non-empty string"),
        ({"model": ["a", ["b"]]}, "model[1]", "a non-empty string"),
        ({"model": ["a", "m" * 513]}, "model[1]", "at most 512"),
        ({"adapter": ""}, "adapter", "a mix such as"),
        ({"adapter": ["sql"]}, "adapter", "the name of an adapter"),
        ({"adapter": "a" * 513}, "adapter", "at most 512"),
        ({"lora": [{"id": 0, "scale": 100.5}]}, "lora[0].scale", "from -100 to 100"),
        ({"lora": [{"id": 0, "scale": 1}, {"id": 0, "scale": True}]}, "lora[1].scale", "found true"),
        ({"lora": [{"id": 0, "scale": 1}], "adapter": "a"}, "adapter", 'beside "lora"'),
        ({"lora_path": "a", "adapter": "a"}, "adapter", 'beside "lora_path"'),
    ],
)
def test_what_names_none_is_refused_as_it_was_spelled(members: dict[str, Any], param: str, message: str) -> None:
    error = refusal(**members)
    assert (error.param, message in error.message) == (param, True), error.message


def test_a_list_of_models_multiplies_the_choices_and_their_bound() -> None:
    request = parse(WireLimits(max_choices=12), model=["a", "b"], prompt=["x", "y", "z"], n=2)
    assert (request.num_parts, request.num_choices) == (6, 12)
    assert [request.listed_model_of(part) for part in range(6)] == ["a", "a", "a", "b", "b", "b"]
    assert [request.prompt_of(part).text for part in range(6)] == ["x", "y", "z"] * 2
    error = refusal(WireLimits(max_choices=11), model=["a", "b"], prompt=["x", "y", "z"], n=2)
    assert (error.param, "models times prompts times it" in error.message) == ("n", True)
    assert "found 2 × 3 × 2 = 12" in error.message
    assert parse(prompt=["x"]).listed_model_of(0) is None


def test_a_request_that_was_seeded_still_names_every_model() -> None:
    request = parse(model=["a", "b"])
    assert request.model_copy(update={"seed": 5}).models == ("a", "b")
    assert request.seeded().listed == ("a", "b")
