"""What bodies of /v1/rerank and /v1/score are read as, what is refused in them, and how their answers are written."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from serve_app.api import scoring
from serve_app.api.dialects import OPENAI, UNION
from serve_app.api.limits import WireLimits
from serve_app.api.responses import ResponseHead
from serve_app.api.scoring import ClassifyRequest, RerankRequest, ScoreRequest
from serve_app.core.delta import Recording, Usage
from serve_app.core.errors import InvalidRequest, UnsupportedParameter
from serve_app.core.request import EmbeddingForm, HeadForm

LIMITS = WireLimits(max_inputs=3, max_prompt_chars=8)
HEAD = ResponseHead(id="rerank-1", created=1, model="tiny")
FORM = HeadForm(labels=("relevant",), activation="sigmoid")


def read(kind: type[ClassifyRequest], **members: object) -> Any:
    return kind.read(members, LIMITS, UNION, model=lambda: "only")


def recordings(*vectors: Sequence[float]) -> list[Recording]:
    return [Recording(hidden_states=array("f", each).tobytes(), num_states=1) for each in vectors]


def ranked(request: RerankRequest, form: EmbeddingForm, *vectors: Sequence[float]) -> list[tuple[int, float]]:
    body: Any = request.answer(HEAD, form, recordings(*vectors), Usage())
    return [(each["index"], each["relevance_score"]) for each in body["results"]]


def test_documents_are_texts_or_objects_with_one() -> None:
    request = read(RerankRequest, query="q", documents=["a", {"text": "b"}], activation=False, odd=1)
    assert request.pairs == (("q", "a"), ("q", "b"))
    assert [each.parts for each in request.prompts] == [("q", "a"), ("q", "b")]
    assert (request.model, request.use_activation, request.ignored_parameters) == ("only", False, ("odd",))
    assert read(RerankRequest, query="q", documents="a").pairs == (("q", "a"),)


@pytest.mark.parametrize(("first", "second"), [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_the_texts_of_pairs_have_vllms_other_names_too(first: str, second: str) -> None:
    assert read(ScoreRequest, **{first: "a", second: ["b", "c"]}).pairs == (("a", "b"), ("a", "c"))
    with pytest.raises(InvalidRequest, match=second):
        read(ScoreRequest, **{first: "a", second: ["b", ""]})


def test_one_first_text_is_that_of_every_pair() -> None:
    assert read(ScoreRequest, text_1="a", text_2=["b", "c"]).pairs == (("a", "b"), ("a", "c"))
    assert read(ScoreRequest, text_1=["a", "b"], text_2=["c", "d"]).pairs == (("a", "c"), ("b", "d"))


@pytest.mark.parametrize(
    ("kind", "members", "param", "words"),
    [
        (RerankRequest, {"query": "q"}, "documents", "found nothing"),
        (RerankRequest, {"documents": "a"}, "query", "found nothing"),
        (RerankRequest, {"query": "", "documents": "a"}, "query", "must be a non-empty string"),
        (RerankRequest, {"query": ["q"], "documents": "a"}, "query", "must be a non-empty string"),
        (RerankRequest, {"query": "q", "documents": []}, "documents", "or a list of 1 to 3 of them; found []"),
        (RerankRequest, {"query": "q", "documents": list("abcd")}, "documents", "found 4 elements"),
        (RerankRequest, {"query": "q", "documents": ["a", {"text": ""}]}, "documents[1].text", 'found ""'),
        (
            RerankRequest,
            {"query": "q", "documents": ["a", {"image": "b"}]},
            "documents[1]",
            'object with such a "text"',
        ),
        (RerankRequest, {"query": "q", "documents": "a" * 9}, "documents", "at most 8 characters"),
        (RerankRequest, {"query": "q", "documents": "a", "top_n": -1}, "top_n", "an integer from 0"),
        (RerankRequest, {"query": "q", "documents": "a", "instruction": "b"}, "instruction", "not carried out"),
        (ScoreRequest, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2", "as many texts as text_1"),
        (ClassifyRequest, {"input": "a", "stream": True}, "stream", "not carried out"),
    ],
)
def test_what_is_wrong_is_named(
    kind: type[ClassifyRequest], members: dict[str, object], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(kind, **members)
    assert caught.value.param == param
    assert words in caught.value.message


def test_the_query_counts_with_each_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_PAIRED_CHARS", 10)
    assert len(read(RerankRequest, query="abc", documents=["de", "fg"]).pairs) == 2
    with pytest.raises(InvalidRequest, match=r"at most 10 characters together.*found 11 in 2 pairs"):
        read(RerankRequest, query="abc", documents=["de", "fgh"])


def test_a_strict_dialect_refuses_unknown_names() -> None:
    with pytest.raises(UnsupportedParameter):
        RerankRequest.read({"query": "q", "documents": "a", "odd": 1}, LIMITS, OPENAI, model=lambda: "only")


def test_the_best_documents_come_first_by_logit_and_by_cosine() -> None:
    request = read(RerankRequest, query="q", documents=["a", "b", "c"], top_n=2)
    assert [index for index, _ in ranked(request, FORM, [0.1], [0.9], [0.5])] == [1, 2]
    apart = request.apart()
    assert [each.text for each in apart.prompts] == ["a", "b", "c", "q"]
    assert not apart.needs_head
    found = ranked(apart, EmbeddingForm(), [0.0, 1.0], [0.6, 0.8], [-1.0, 0.0], [1.0, 0.0])
    assert found == [(1, pytest.approx(0.6)), (0, 0.0)]


def test_a_text_that_stands_in_several_pairs_is_embedded_once() -> None:
    request = read(ScoreRequest, text_1=["a", "b"], text_2=["b", "a"]).apart()
    assert [each.text for each in request.prompts] == ["b", "a"]
    body: Any = request.answer(HEAD, EmbeddingForm(), recordings([1.0, 0.0], [0.6, 0.8]), Usage())
    assert [each["score"] for each in body["data"]] == [pytest.approx(0.6)] * 2
