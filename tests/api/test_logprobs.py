"""Vectors as they stand in bodies: each number read back as it was, none of it mistaken for anybody's text."""

from __future__ import annotations

import base64
import json
import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.logprobs import ShownRecording, numbers_text
from serve_app.api.sse import Fragment, dump
from serve_app.core.delta import Recording

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
TEXT = st.text(max_size=20)


@given(st.lists(FLOAT32))
def test_every_float32_is_read_back_as_it_was(numbers: list[float]) -> None:
    read = json.loads(numbers_text(array("f", numbers).tobytes()))
    assert array("f", read) == array("f", numbers)


@given(st.recursive(TEXT | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner)), TEXT)
def test_fragments_stand_where_they_are_met_and_change_nothing_else(value: object, text: str) -> None:
    fragment = Fragment(json.dumps({"any": text}))
    whole = {"first": fragment, "value": value, text: [fragment, "0", fragment]}
    plain = {"first": {"any": text}, "value": value, text: [{"any": text}, "0", {"any": text}]}
    assert json.loads(dump(whole)) == json.loads(dump(plain))


def test_what_is_no_json_is_no_fragment() -> None:
    with pytest.raises(TypeError, match="bytes is no JSON"):
        dump({"a": b"x"})
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump({"a": math.nan})


def test_states_are_a_list_of_lists_unless_there_is_one_by_itself() -> None:
    states = Recording(hidden_states=array("f", [1, 2, 3, 4]).tobytes(), num_states=2)
    one = Recording(hidden_states=array("f", [1, 2]).tobytes(), num_states=1)
    assert json.loads(dump(ShownRecording(recording=states).members())) == {"hidden_states": [[1, 2], [3, 4]]}
    assert json.loads(dump(ShownRecording(recording=one).members())) == {"hidden_states": [[1, 2]]}
    assert json.loads(dump(ShownRecording(recording=one, is_flat=True).members())) == {"hidden_states": [1, 2]}
    assert ShownRecording(recording=Recording()).members() == {}


def test_experts_are_base64_with_their_shape() -> None:
    data = array("i", [1, 2, 3, -1]).tobytes()
    shown = ShownRecording(recording=Recording(experts=data, experts_shape=(1, 2, 2))).members()
    assert shown == {
        "sglext": {"routed_experts": base64.b64encode(data).decode(), "routed_experts_shape": [1, 2, 2]},
    }
