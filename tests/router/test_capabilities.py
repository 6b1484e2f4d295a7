"""What an engine cannot do is refused by name before anything runs; nothing is left out in silence."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any, get_args

import pytest

from serve_app.api.dialects import DIALECTS
from serve_app.api.embeddings import EmbeddingRequest
from serve_app.api.scoring import ClassifyRequest
from serve_app.catalog.resolve import Wanted
from serve_app.core.cards import (
    EVERYTHING,
    AdapterKind,
    Capabilities,
    ModelCard,
    OtherSampling,
    RecordCard,
    RecordingKind,
)
from serve_app.core.errors import UnsupportedParameter
from serve_app.core.names import ModelRef, Part, mixed
from serve_app.core.prompt import ImageCard, Prompt
from serve_app.core.request import ConstraintKind, EmbeddingForm, GenerationRequest, HeadForm, SamplerName
from serve_app.router.capabilities import check_capabilities
from serve_app.router.lower import lower, record_wanted
from tests.api.test_dialects import VALUES
from tests.fakes import model_card
from tests.parsing import parse_completion
from tests.pictures import sent

NOTHING = Capabilities(
    sampling=frozenset(), constraints=frozenset(), adapters=frozenset(), recordings=frozenset()
)  # fmt: skip
RECORDS = RecordCard(
    returns_hidden_states=True, returns_routed_experts=True, embedding=EmbeddingForm(), hidden_size=4
)  # fmt: skip
REFS = {
    "tiny:sql": ModelRef(base="tiny", adapter="sql", version="v1"),
    "tiny:sql*0.5": mixed("tiny", [Part(adapter="sql", version="v1", scale=0.5)]),
    "tiny:a+b": mixed("tiny", [Part(adapter="a", version="v1"), Part(adapter="b", version="v2")]),
}

NEEDS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("sampling", "penalties", "repetition_penalty", {"repetition_penalty": 1.1, "temperature": 0}),
    ("sampling", "penalties", "presence_penalty", {"presence_penalty": 0.5}),
    ("sampling", "penalties", "frequency_penalty", {"frequency_penalty": 0.5}),
    ("sampling", "dry", "dry_multiplier", {"dry_multiplier": 0.8}),
    *(("sampling", name, name, {name: VALUES[name]}) for name in get_args(SamplerName) if name in VALUES),
    ("sampling", "typ_p", "typical_p", {"typical_p": 0.9}),
    ("sampling", "xtc", "xtc_probability", {"xtc_probability": 0.5}),
    ("sampling", "dynamic_temperature", "dynatemp_range", {"dynatemp_range": 0.5}),
    ("sampling", "mirostat", "mirostat", {"mirostat": 2}),
    ("sampling", "logit_bias", "logit_bias", {"logit_bias": {"5": 1.0}}),
    ("sampling", "logit_bias", "logit_bias", {"logit_bias": [["text", 1.0]]}),
    ("sampling", "allowed_token_ids", "allowed_token_ids", {"allowed_token_ids": [5]}),
    ("sampling", "bad_words", "bad_words", {"bad_words": ["never"]}),
    ("sampling", "sampler_order", "samplers", {"samplers": ["min_p", "top_p"], "min_p": 0.1, "top_p": 0.5}),
    ("constraints", "json_schema", "json_schema", {"json_schema": {"type": "object"}}),
    ("constraints", "regex", "regex", {"regex": "a+"}),
    ("constraints", "choice", "guided_choice", {"guided_choice": ["a", "b"]}),
    ("adapters", "plain", "model", {"model": "tiny:sql"}),
    ("adapters", "scaled", "model", {"model": "tiny:sql*0.5"}),
    ("adapters", "mixed", "model", {"model": "tiny:a+b"}),
    ("recordings", "hidden_states", "return_hidden_states", {"return_hidden_states": True}),
    ("recordings", "routed_experts", "return_routed_experts", {"return_routed_experts": True}),
]


def card_of(capabilities: Capabilities | None) -> ModelCard:
    """None is a card of the form that says nothing of them."""
    card = replace(model_card("tiny"), records=RECORDS)
    return card if capabilities is None else replace(card, capabilities=capabilities)


def resolve(wanted: Wanted) -> ModelRef:
    return REFS.get(wanted.model, ModelRef(base="tiny"))


def lowered(capabilities: Capabilities | None, **members: object) -> tuple[GenerationRequest, ...]:
    body = json.dumps({"model": "tiny", "prompt": "Hello", "temperature": 1, **members}).encode()
    request = parse_completion(body, choose_dialect=lambda model: DIALECTS["union"])
    return lower(request, "cmpl-1", resolve=resolve, card_of=lambda ref: card_of(capabilities))


def without(field: str, kind: str) -> Capabilities:
    return replace(EVERYTHING, **{field: getattr(EVERYTHING, field) - {kind}})


@pytest.mark.parametrize(("field", "kind", "param", "members"), NEEDS, ids=lambda each: str(each)[:30])
def test_a_need_that_the_card_lacks_is_a_400_that_names_the_parameter(
    field: str, kind: str, param: str, members: dict[str, Any]
) -> None:
    with pytest.raises(
        UnsupportedParameter,
        match=f"tiny, whose engine \\(own\\) does not support .*{'adapters' if field == 'adapters' else kind}",
    ) as refusal:
        lowered(without(field, kind), **members)
    assert (refusal.value.param, refusal.value.status) == (param, 400)
    assert lowered(replace(NOTHING, **{field: getattr(EVERYTHING, field)}), **members), "it is all that was needed"


@pytest.mark.parametrize("members", [members for *_, members in NEEDS], ids=lambda each: str(each)[:30])
def test_a_card_that_says_nothing_of_its_engine_refuses_nothing(members: dict[str, Any]) -> None:
    assert lowered(None, **members)


def test_dry_grammars_and_hidden_states_are_refused_and_their_neighbours_are_not() -> None:
    less = Capabilities(
        sampling=EVERYTHING.sampling - {"dry"},
        constraints=EVERYTHING.constraints - {"gbnf", "lark", "llguidance"},
        recordings=frozenset(),
    )
    for members, param in (
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"return_hidden_states": True}, "return_hidden_states"),
    ):
        with pytest.raises(UnsupportedParameter) as refusal:
            lowered(less, **members)
        assert refusal.value.param == param
    assert lowered(less, top_k=5, presence_penalty=1, regex="a+", model="tiny:a+b", dry_multiplier=0)


def test_a_request_that_needs_nothing_goes_to_an_engine_that_can_do_nothing() -> None:
    assert lowered(NOTHING)
    assert lowered(NOTHING, temperature=0, top_k=40, min_p=0.05), "greedy, they have no effect"


def test_a_refusal_names_the_model_of_a_list() -> None:
    with pytest.raises(UnsupportedParameter, match=r'^Model "tiny:sql": "model\[1\]" must'):
        lowered(NOTHING, model=["tiny", "tiny:sql"])


def test_embeddings_are_refused_where_the_engine_has_none() -> None:
    wanted = EmbeddingRequest(model="tiny", prompts=(Prompt(parts=("a",)),))
    with pytest.raises(UnsupportedParameter, match='not support embeddings; found "tiny"'):
        record_wanted(wanted, card_of(without("recordings", "embeddings")))
    others = card_of(without("recordings", "hidden_states"))
    (request,) = lowered(None)
    check_capabilities(replace(request, record=record_wanted(wanted, others)), others, model_param="model")


def test_scores_of_a_classification_head_are_refused_where_the_engine_has_no_vectors() -> None:
    head = HeadForm(labels=("good", "bad"), activation="softmax")
    card = card_of(without("recordings", "embeddings"))
    wanted = ClassifyRequest(model="tiny", prompts=(Prompt(parts=("a",)),))
    with pytest.raises(UnsupportedParameter, match='not support embeddings; found "tiny"'):
        record_wanted(wanted, replace(card, records=replace(RECORDS, head=head)))


@pytest.mark.parametrize(("members", "is_told"), [({"engine": "vllm"}, True), ({}, False), ({"images": None}, False)])
def test_images_are_refused_with_the_way_out_where_it_is_the_engine_that_takes_none(
    members: dict[str, Any], is_told: bool
) -> None:
    card = replace(model_card("tiny"), **{"images": ImageCard(reason="text alone"), **members})
    body = json.dumps({"model": "tiny", "prompt": "<image>Hello", "images": [sent(1)]}).encode()
    with pytest.raises(UnsupportedParameter) as refusal:
        lower(parse_completion(body), "cmpl-1", resolve=resolve, card_of=lambda ref: card)
    assert ('"engine: own"' in str(refusal.value)) is is_told


def test_every_kind_is_in_the_whole_set() -> None:
    for field, kinds in (
        ("sampling", {*get_args(SamplerName), *get_args(OtherSampling)}),
        ("constraints", {*get_args(ConstraintKind)}),
        ("adapters", {*get_args(AdapterKind)}),
        ("recordings", {*get_args(RecordingKind)}),
    ):
        assert getattr(EVERYTHING, field) == kinds
    assert len(fields(Capabilities)) == 4
    assert {kind for field, kind, *_ in NEEDS if field == "sampling"} == EVERYTHING.sampling, "each has a case above"
