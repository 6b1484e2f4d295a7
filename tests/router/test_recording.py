"""What a client wants of a computation, in the engine's terms, or why it is not had of this model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from serve_app.api.dialects import SGLANG, UNION
from serve_app.api.embeddings import EmbeddingRequest
from serve_app.core.cards import RecordCard
from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import Prompt
from serve_app.core.request import EmbeddingForm, RecordParams
from serve_app.router.lower import record_wanted
from tests.fakes import model_card
from tests.parsing import parse_completion

OPEN = RecordCard(
    returns_hidden_states=True, returns_routed_experts=True, embedding=EmbeddingForm(pooling="last"), hidden_size=8
)
STATES, EXPERTS = "return_hidden_states", "return_routed_experts"


def wanted(records: RecordCard = OPEN, *, dialect=UNION, **members: object):
    body = json.dumps({"model": "tiny", "prompt": "a", **members}).encode()
    request = parse_completion(body, choose_dialect=lambda model: dialect)
    return record_wanted(request, replace(model_card(), records=records))


def embedded(records: RecordCard, dimensions: int | None):
    request = EmbeddingRequest(model="tiny", prompts=(Prompt(parts=("a",)),), dimensions=dimensions)
    return record_wanted(request, replace(model_card(), records=records))


@pytest.mark.parametrize(
    ("members", "record"),
    [
        ({}, None),
        ({STATES: False, EXPERTS: False}, None),
        ({STATES: True}, RecordParams(hidden_states="drawn", name=STATES)),
        ({STATES: "last"}, RecordParams(hidden_states="last", name=STATES)),
        ({STATES: "last", "echo": True}, RecordParams(hidden_states="last", name=STATES)),
        ({STATES: True, "echo": True}, RecordParams(hidden_states="all", name=STATES)),
        ({STATES: True, "echo_last": 3}, RecordParams(hidden_states="all", echoed=3, name=STATES)),
        ({EXPERTS: True}, RecordParams(experts=True, name=EXPERTS)),
        ({STATES: True, EXPERTS: True}, RecordParams(hidden_states="drawn", experts=True, name=STATES)),
    ],
)
def test_what_is_wanted_follows_from_the_two_and_from_echo(members, record):
    assert wanted(**members) == record


def test_sglang_returns_the_last_state_alone():
    assert wanted(dialect=SGLANG, **{STATES: True}).hidden_states == "last"
    assert wanted(dialect=SGLANG) is None


@pytest.mark.parametrize("name", [STATES, EXPERTS])
def test_what_is_not_configured_is_refused_with_its_key(name):
    with pytest.raises(InvalidRequest, match=f'allows it with "{name}: true" in its args') as caught:
        wanted(RecordCard(), **{name: True})
    assert caught.value.param == name


@pytest.mark.parametrize("value", [1, "all", "", ["last"]])
def test_states_are_a_boolean_or_last(value):
    with pytest.raises(InvalidRequest, match='must be a boolean or "last"'):
        wanted(**{STATES: value})


@pytest.mark.parametrize(
    ("sizes", "dimensions", "is_taken"),
    [
        ((), None, True), ((), 8, True), ((), 4, False), ((), 9, False),
        ((2, 4), 4, True), ((2, 4), 8, True), ((2, 4), 3, False),
        ((0,), 1, True), ((0,), 8, True), ((0,), 9, False),
    ],
)  # fmt: skip
def test_an_embedding_is_cut_to_what_its_model_was_trained_for(sizes, dimensions, is_taken):
    records = replace(OPEN, embedding_sizes=sizes)
    if is_taken:
        record = embedded(records, dimensions)
        assert record == RecordParams(
            hidden_states="last", name="input", dimensions=dimensions, embedding=EmbeddingForm(pooling="last")
        )
        return
    with pytest.raises(InvalidRequest, match="was trained for no others") as caught:
        embedded(records, dimensions)
    assert caught.value.param == "dimensions"
