"""Bodies and chunks have the shape of the contract, and the quick way of writing equals the slow one."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.api.dialects import DIALECTS, ErrorShape, error_body, error_event_body, error_status
from serve_app.api.listings import list_models
from serve_app.api.logprobs import LegacyLogprobs
from serve_app.api.responses import (
    Choice,
    ChunkWriter,
    ResponseHead,
    completion_body,
    token_counts,
    usage_body,
    written_choice,
)
from serve_app.api.sse import DONE, comment, dump, event
from serve_app.core.delta import FinishReason, TokenLogprob, TopLogprob, Usage
from serve_app.core.errors import AdapterNotFound, ContextOverflow, InvalidRequest, ModelNotFound
from serve_app.core.names import ModelRef, Part, mixed
from tests.fakes import adapter_card, model_card

HEAD = ResponseHead(id="cmpl-1", created=1_746_835_200, model='odd"name:ädapter')


def logprobs_of(*entries: TokenLogprob) -> LegacyLogprobs:
    logprobs = LegacyLogprobs()
    logprobs.extend(entries)
    return logprobs


def chunk_body(head, choices, *, extras=None):
    """One chunk of a stream, said plainly."""
    start = {"id": head.id, "object": "text_completion", "created": head.created, "model": head.model}
    return {**start, "choices": [choice.body() for choice in choices], **(extras or {})}


def slow(body: dict[str, object]) -> bytes:
    return event(json.dumps(body, separators=(",", ":")))


def test_a_body_has_every_key_that_the_contract_promises():
    choice = Choice(index=0, text="…", finish_reason=FinishReason.STOP, matched_stop=2)
    body = completion_body(HEAD, [choice], usage=Usage(prompt_tokens=5, completion_tokens=12, cached_tokens=4))
    assert body == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1_746_835_200,
        "model": 'odd"name:ädapter',
        "choices": [{"index": 0, "text": "…", "logprobs": None, "finish_reason": "stop", "matched_stop": 2}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 12,
            "total_tokens": 17,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


CHOICES = st.builds(
    Choice,
    index=st.integers(0, 1000),
    text=st.text(),
    logprobs=st.none()
    | st.builds(
        logprobs_of,
        st.builds(
            TokenLogprob,
            token_id=st.just(1),
            text=st.text(),
            logprob=st.none() | st.floats(max_value=0),
            offset=st.integers(0, 99),
        ),
    ),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    matched_stop=st.none() | st.text() | st.integers(0, 2**31),
    token_ids=st.none() | st.lists(st.integers(0, 99), max_size=3).map(tuple),
    prompt_token_ids=st.none() | st.just((1, 2)),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(CHOICES, st.text(min_size=1))
def test_a_chunk_equals_the_slow_dump_of_its_body(choice, model):
    head = ResponseHead(id="cmpl-1", created=7, model=model)
    writer = ChunkWriter(head, written_choice)
    assert writer.choice(choice) == slow(chunk_body(head, [choice]))
    extras = {"usage": token_counts(3, 4), "timings": {"cache_n": 1}}
    assert writer.choice(choice, extras) == slow(chunk_body(head, [choice], extras=extras))


def test_the_usage_chunk_has_no_choices():
    usage = Usage(prompt_tokens=4, completion_tokens=4)
    extras = {"usage": usage_body(usage)}
    assert ChunkWriter(HEAD, written_choice).bare(extras) == slow(chunk_body(HEAD, [], extras=extras))


def test_events_are_one_line_between_blank_ones():
    assert event("{}") == b"data: {}\n\n"
    assert DONE == b"data: [DONE]\n\n"
    assert comment("still\nhere") == b": still here\n\n"


def test_top_logprobs_hold_the_likeliest_and_the_chosen_and_the_first_of_equal_texts_wins():
    entry = TokenLogprob(
        token_id=3,
        text="c",
        logprob=-3.0,
        offset=0,
        top=(
            TopLogprob(token_id=1, text="a", logprob=-1.0),
            TopLogprob(token_id=2, text="a", logprob=-2.0),
        ),
    )
    assert logprobs_of(entry).top_logprobs == [{"a": -1.0, "c": -3.0}]


def test_without_a_count_the_chosen_token_stands_alone():
    entry = TokenLogprob(token_id=3, text="c", logprob=-3.0, offset=0)
    assert logprobs_of(entry).top_logprobs == [{"c": -3.0}]


def test_the_first_token_of_a_prompt_has_no_logprob():
    body = logprobs_of(TokenLogprob(token_id=1, text="a", logprob=None, offset=0)).body()
    assert body == {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_what_json_cannot_write_becomes_the_lowest_logprob(value):
    top = (TopLogprob(token_id=9, text="x", logprob=value),)
    entry = TokenLogprob(token_id=1, text="a", logprob=value, offset=0, top=top)
    body = logprobs_of(entry).body()
    assert body["token_logprobs"] == [-9999.0]
    assert body["top_logprobs"] == [{"x": -9999.0, "a": -9999.0}]
    assert json.loads(dump(body)) == body


def test_offsets_are_shifted_behind_the_prompt():
    logprobs = LegacyLogprobs()
    logprobs.extend([TokenLogprob(token_id=1, text="a", logprob=-1.0, offset=2)], shift=10)
    assert logprobs.text_offset == [12]


def test_an_error_tells_status_code_and_facts():
    error = ContextOverflow("too long", "prompt", {"n_prompt_tokens": 600, "n_ctx": 512})
    assert error_body(error) == {
        "error": {
            "message": "too long",
            "type": "exceed_context_size_error",
            "param": "prompt",
            "code": 400,
            "error_code": "context_length_exceeded",
            "n_prompt_tokens": 600,
            "n_ctx": 512,
        }
    }
    assert event(dump(error_event_body(ModelNotFound("no")))).startswith(b'data: {"error":{"message":"no"')


def test_the_shape_and_the_status_of_an_error_are_its_dialects_own():
    error = InvalidRequest('"n" must be …', "n")
    assert error_body(error, DIALECTS["mistral.rs"]) == {"message": '"n" must be …'}
    assert error_body(error, DIALECTS["sglang"]) == {
        "object": "error",
        "message": '"n" must be …',
        "type": "BadRequestError",
        "param": "n",
        "code": 400,
        "error_code": "invalid_value",
    }
    assert error_body(error, DIALECTS["openai"])["error"] == error_body(error)["error"] | {"code": "invalid_value"}
    for name in ("llama.cpp", "fireworks", "omlx"):
        assert error_body(error, DIALECTS[name]) == error_body(error)


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_an_error_in_a_stream_is_wrapped_in_every_dialect(dialect):
    error = AdapterNotFound("none", "model")
    code = "adapter_not_found" if dialect.error_shape is ErrorShape.OPENAI else error_status(error, dialect)
    assert error_event_body(error, dialect)["error"]["code"] == code


def test_models_are_listed_with_their_usable_adapters_and_aliases():
    card = model_card("tiny", adapter_card("sql"), adapter_card("broken", reason="rank 0"))
    half = mixed("tiny", [Part(adapter="sql", version="sql-1", scale=0.5)])
    aliases = {"fast": ModelRef(base="tiny", adapter="sql", version="v1"), "gone": ModelRef(base="no"), "half": half}
    weights = {name: {target: 1.0} for name, target in aliases.items()}
    listed = [asdict(entry) for entry in list_models([card, model_card("big")], weights)]
    assert [(entry["id"], entry["parent"]) for entry in listed] == [
        ("big", None),
        ("tiny", None),
        ("tiny:sql", "tiny"),
        ("fast", "tiny:sql"),
        ("half", "tiny:sql*0.5"),
    ]
    assert listed[1] == {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "serve_app",
        "root": "models/tiny",
        "parent": None,
        "max_model_len": 512,
        "version": None,
        "default_sampling": {},
        "weights": None,
        "engine": "own",
        "lacks": (),
        "refuses": ("return_hidden_states", "return_routed_experts"),
        "capabilities": ("completion",),
    }
    assert listed[2]["version"] == "v1"
