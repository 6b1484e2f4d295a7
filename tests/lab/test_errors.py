"""An error reads as the service told it, whatever its dialect and wherever it came from."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.core.errors import InvalidRequest
from serve_app.lab.errors import of_envelope
from serve_app.lab.magics import MalformedLine, parsed

MESSAGE = InvalidRequest.refusing("temperature", must="be a number from 0 to 2", found="3").message
BODIES: list[dict[str, Any]] = [
    {"error": {"message": MESSAGE, "param": "temperature", "code": 400, "error_code": "invalid_value", "n": 7}},
    {"error": {"message": MESSAGE, "param": "temperature", "code": "invalid_value", "n": 7}},
    {"object": "error", "message": MESSAGE, "param": "temperature", "code": 400, "error_code": "invalid_value", "n": 7},
]


@pytest.mark.parametrize("body", BODIES)
def test_an_error_says_which_parameter_what_is_allowed_and_what_was_found(body: dict[str, Any]) -> None:
    error = of_envelope(body, status=400, otherwise="")
    assert (error.param, error.code, error.status) == ("temperature", "invalid_value", 400)
    assert (error.allowed, error.found) == ("be a number from 0 to 2", "3")
    assert error.facts == {"n": 7}
    assert error._render_traceback_() == str(error).splitlines()
    assert str(error).startswith(MESSAGE)


def test_an_error_of_one_of_several_models_is_read_alike() -> None:
    message = InvalidRequest.refusing("n", must="be odd", found="2").about("demo:x").message
    error = of_envelope({"error": {"message": message}}, status=400, otherwise="")
    assert (error.allowed, error.found) == ("be odd", "2")


def test_a_body_that_is_no_envelope_is_told_as_it_is() -> None:
    error = of_envelope("Request rejected.", status=503, otherwise="503 Request rejected.")
    assert str(error) == "503 Request rejected.\n  error      503"
    assert error.allowed is None


def test_a_magics_line_is_read_into_parameters() -> None:
    line = parsed("""demo demo:pirate --max-tokens 32 --temperature=0.5 --stop '["a", "b"]' --into table --seed -1""")
    assert line.names == ("demo", "demo:pirate")
    assert line.options == {"max_tokens": 32, "temperature": 0.5, "stop": ["a", "b"], "into": "table", "seed": -1}


def test_an_option_without_its_value_is_named() -> None:
    with pytest.raises(MalformedLine, match="--max-tokens has no value"):
        parsed("demo --max-tokens")
