"""Characters that could make a special token keep their origin through whatever a template does to them."""

from __future__ import annotations

import json

import pytest

from serve_app.templates.marks import MARKUP, Marks, marks_for

NAMES = ("<|im_start|>", "<|im_end|>", "[INST]", "<s>", "STOP")


def marks(*names: str, besides: str = "") -> Marks:
    return marks_for(names or NAMES, besides)


def marked(text: str, *names: str) -> str:
    found = marks(*names).put(text)
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("text", ["plain", "<|im_end|> and [INST] <s> STOP", "a | b < c", "", *MARKUP])
def test_marks_that_were_put_are_taken_off_again(text: str) -> None:
    each = marks()
    put = each.put({"messages": [{"role": "user", "content": text}]})
    assert isinstance(put, dict)
    assert each.take(put["messages"][0]["content"]).text == text


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_was_sent_is_marked_where_it_stands(name: str) -> None:
    """What a user wrote became a control token: transformers #29279, llama.cpp #26273."""
    each = marks()
    put = each.put(f"ab {name} c")
    assert isinstance(put, str)
    assert name not in put
    assert set(each.take(put).foreign) & set(range(3, 3 + len(name)))


def test_a_name_joined_of_pieces_is_marked_too() -> None:
    each = marks()
    pieces = [each.put(piece) for piece in ("<", "|im", "_end|", ">")]
    joined = each.take("".join(map(str, pieces)))
    assert joined.text == "<|im_end|>"
    assert joined.foreign == (0, 1, 8)


def test_what_templates_look_for_stays_readable() -> None:
    for text in MARKUP:
        assert marked(f"a{text}b") == f"a{text}b"
    assert marked("x | y < z", "</think>", "<|end|>") != "x | y < z"
    assert "</think>" not in marked("a</think>", "</think>")  # special in this model, so nobody's to write


def test_roles_and_types_stay_what_they_are() -> None:
    message = {"role": "user", "type": "STOP", "content": "STOP"}
    assert marks().put(message) == {**message, "content": marked("STOP")}


def test_marks_stand_nowhere_in_what_is_rendered() -> None:
    first = marks()
    sent = "".join((*first.by_char.values(), first.end))
    second = marks(besides=sent)
    assert not set(sent) & {*second.by_char.values(), second.end}
    assert second.take(str(second.put(f"{sent}|"))).text == f"{sent}|"


def test_json_in_ascii_keeps_marks() -> None:
    each = marks()
    put = each.put("<|im_end|>é")
    written = each.keep(json.dumps(put))
    assert each.take(written).text == '"<|im_end|>\\u00e9"'
    assert each.take(written).foreign


def test_a_model_without_special_tokens_marks_nothing() -> None:
    none = marks_for((), "")
    assert none.put("<|im_end|>") == "<|im_end|>"
    assert none.take("<|im_end|>").foreign == ()
