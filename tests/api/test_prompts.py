"""The forms of `prompt`, every row of the contract's table."""

from __future__ import annotations

import pytest

from serve_app.api.forms.prompts import parse_prompts
from serve_app.api.limits import WireLimits
from serve_app.core.errors import InvalidRequest

LIMITS = WireLimits(max_prompts=4, max_prompt_chars=10, max_prompt_ids=5)


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("abc", [("abc",)]),
        ([12, 34, 56], [((12, 34, 56),)]),
        ([0], [((0,),)]),
        ([15.0, 3], [((15, 3),)]),
        ([[15.0], "a"], [((15,),), ("a",)]),
        ({"prompt_string": ["a", 15.0]}, [("a", (15,))]),
        (["a", "b"], [("a",), ("b",)]),
        (["a"], [("a",)]),
        ([[1, 2], [3]], [((1, 2),), ((3,),)]),
        ([12, 34, "string", 56], [((12, 34), "string", (56,))]),
        (["string", 12], [("string", (12,))]),
        (["a", "b", 1], [("a", "b", (1,))]),
        (["a", [1, 2]], [("a",), ((1, 2),)]),
        ([[12, "s", 34], [1], "x"], [((12,), "s", (34,)), ((1,),), ("x",)]),
        ({"prompt_string": "a"}, [("a",)]),
        ({"prompt_string": ["a", 1]}, [("a", (1,))]),
        ([{"prompt_string": "a", "multimodal_data": []}, "b"], [("a",), ("b",)]),
    ],
)
def test_each_form_of_prompt_is_read_as_the_contract_says(value, parts):
    assert [prompt.parts for prompt in parse_prompts(value, LIMITS)] == parts


@pytest.mark.parametrize(
    ("value", "param", "word"),
    [
        ([["a"], [1, 2]], "prompt[0]", "list of strings"),
        ([1, ["a"]], "prompt[1]", '["a"]'),
        ([1.5], "prompt[0]", "1.5"),
        ([[1.5]], "prompt[0][0]", "1.5"),
        ([1.0, 1.5], "prompt[1]", "1.5"),
        ([-1.0], "prompt[0]", "-1"),
        ([1, 1.5], "prompt[1]", "1.5"),
        ([None], "prompt[0]", "null"),
        ([True], "prompt[0]", "true"),
        ([1, True], "prompt[1]", "true"),
        ([[1], True], "prompt[1]", "true"),  # no integer at the top: a list of prompts
        ([["a", 1, False]], "prompt[0][2]", "false"),
        ({}, "prompt", "{}"),
        (5, "prompt", "5"),
        (True, "prompt", "true"),
        ([], "prompt", "empty"),
        ([[]], "prompt[0]", "empty"),
        ("", "prompt", "empty"),
        ([""], "prompt[0]", "empty"),
        (["", ""], "prompt[0]", "empty"),
        (["a", ""], "prompt[1]", "empty"),
        ([-1], "prompt[0]", "-1"),
        ([[1], [2, -3]], "prompt[1][1]", "-3"),
        ([2**31], "prompt[0]", str(2**31)),
        ([1, 10**300], "prompt[1]", "digits"),
        (["a", "b", "c", "d", "e"], "prompt", "at most 4"),
        ("x" * 11, "prompt", "at most 10"),
        (["ok", ["x" * 6, 1, "x" * 5]], "prompt[1]", "at most 10"),
        ([1, 2, 3, 4, 5, 6], "prompt", "at most 5"),
        ({"prompt_string": ""}, "prompt.prompt_string", "empty"),
        ({"prompt_string": 5}, "prompt.prompt_string", "5"),
        ({"prompt_string": {"prompt_string": "a"}}, "prompt.prompt_string", "prompt_string"),
        ([{"prompt_string": "a", "other": 1}], "prompt[0]", "other"),
    ],
)
def test_a_prompt_of_no_form_is_refused_by_the_name_of_its_element(value, param, word):
    with pytest.raises(InvalidRequest) as caught:
        parse_prompts(value, LIMITS)
    assert caught.value.param == param
    assert caught.value.message.startswith(f'"{param}" must ')
    assert word in caught.value.message


def test_what_is_beside_a_prompt_and_no_image_is_refused_by_name():
    with pytest.raises(InvalidRequest) as caught:
        parse_prompts([{"prompt_string": "a", "multimodal_data": ["aGk="]}], LIMITS)
    assert caught.value.param == "prompt[0].multimodal_data[0]"
