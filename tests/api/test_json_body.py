"""What is JSON and small enough is read, all else is a 400."""

from __future__ import annotations

import pytest

from serve_app.api.parse import read_json_object
from serve_app.core.errors import InvalidRequest


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": 1,}', "not valid JSON"),
        (b"[1]", "must be a JSON object; found [1]"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": [-Infinity]}', "-Infinity"),
        (b'{"a": 1e400}', "1e400"),
        (b'{"a": -1e999}', "finite"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "digits"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\uDC00": 1}', "surrogate"),
        (b'{"a": 1, "a": 2}', '"a" more than once'),
        (b'{"o": {"b": 1, "b": 1}}', '"b" more than once'),
        (b'{"a": ' + b"[" * 8 + b"]" * 8 + b"}", "more than 8 levels"),
        (b'{"a":' * 9 + b"1" + b"}" * 9, "more than 8 levels"),
        (b"[" * 200_000, "too deeply"),
        (b'{"a":' * 200_000, "too deeply"),
    ],
)
def test_a_body_that_cannot_be_taken_is_refused(body, words):
    with pytest.raises(InvalidRequest) as caught:
        read_json_object(body, max_depth=8)
    assert caught.value.status == 400
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"{}", {}),
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        (b'{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        (b'{"a": ' + b"9" * 4000 + b"}", {"a": int("9" * 4000)}),
        (b'{"a": ' + b"[" * 7 + b"]" * 7 + b"}", {"a": [[[[[[[]]]]]]]}),
    ],
)
def test_what_json_allows_is_read(body, value):
    assert read_json_object(body, max_depth=8) == value
