"""Reranking, scores and classes as transformers computes them of the same checkpoint, from bytes to bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from tokenizers import processors
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.families.making import SPECIAL_TOKENS, byte_tokenizer, fill, make_config
from tests.flow.stack import Stack, running_stack

BEGIN, _, PAD = SPECIAL_TOKENS
QUERY = "Which animal says meow?"
DOCUMENTS = ["The dog says woof. " * 5, "A cat, of course", "Once", "The cat says meow.", f"It ends so{PAD}{PAD}"]
LABELS = ("good", "bad", "neither")

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


def save_classifier(family: str, folder: Path, *, labels: Iterable[str], **settings: Any) -> None:
    """Write a small random classifier whose tokenizer puts tokens of its own around and between two texts."""
    config = make_config(family, {"id2label": dict(enumerate(labels)), **settings})
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    fill(model, seed=7)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    begin = (BEGIN, tokenizer.convert_tokens_to_ids(BEGIN))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[begin]
    )
    tokenizer.save_pretrained(folder)


class Own:
    """The checkpoint as transformers computes it."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    @torch.inference_mode()
    def logits(self, *texts: str) -> Tensor:
        """[labels], of a text or a pair"""
        found: Tensor = self.model(**self.tokenizer(*texts, return_tensors="pt")).logits[0]
        return found

    def scores(self, query: str, documents: Iterable[str]) -> list[float]:
        """As sentence-transformers' CrossEncoder has them: the sigmoid of the one logit."""
        return [float(self.logits(query, each).sigmoid()) for each in documents]


@pytest.fixture(scope="module")
def reranker_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reranker")
    save_classifier("qwen2", folder, labels=["LABEL_0"])
    return folder


@pytest.fixture(scope="module")
def own(reranker_folder: Path) -> Own:
    return Own(reranker_folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(reranker_folder: Path) -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1, path=str(reranker_folder), adapters=None, max_batch_tokens=64) as running:
        yield running


async def asked(stack: Stack, path: str, **body: Any) -> dict[str, Any]:
    response = await stack.post({"model": "demo", **body}, path)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def refusal(stack: Stack, path: str, **body: Any) -> str:
    response = await stack.post({"model": "demo", **body}, path)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "model"
    message: str = error["message"]
    return message


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked_by_the_scores_of_the_checkpoint(stack: Stack, own: Own, path: str) -> None:
    answer = await asked(stack, path, query=QUERY, documents=[DOCUMENTS[0], *({"text": t} for t in DOCUMENTS[1:])])
    scores = own.scores(QUERY, DOCUMENTS)
    assert max(scores) - min(scores) > 0.1
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    assert [each["index"] for each in answer["results"]] == order
    for each in answer["results"]:
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
        assert each["relevance_score"] == pytest.approx(scores[each["index"]], abs=1e-5)
    num_tokens = sum(len(own.tokenizer(QUERY, each).input_ids) for each in DOCUMENTS) - 2  # no padding is computed
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (answer["model"], answer["id"][:7]) == ("demo", "rerank-")
    best = await asked(stack, path, query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=False)
    assert [each["index"] for each in best["results"]] == order[:2]
    assert all("document" not in each for each in best["results"])


async def test_rerank_equals_the_cross_encoder_of_sentence_transformers(stack: Stack, reranker_folder: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = sentence_transformers.CrossEncoder(str(reranker_folder), device="cpu", local_files_only=True)
    ranked = encoder.rank(QUERY, DOCUMENTS)
    answer = await asked(stack, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
    assert [each["index"] for each in answer["results"]] == [each["corpus_id"] for each in ranked]
    scores = [each["relevance_score"] for each in answer["results"]]
    assert scores == pytest.approx([float(each["score"]) for each in ranked], abs=1e-5)


async def test_company_and_cached_prefixes_change_no_score(stack: Stack, own: Own) -> None:
    work = [asked(stack, "/v1/rerank", query=QUERY, documents=DOCUMENTS[::step]) for step in (1, -1, 1, -1)]
    expected = sorted(own.scores(QUERY, DOCUMENTS), reverse=True)
    for answer in await asyncio.gather(*work):
        found = [each["relevance_score"] for each in answer["results"]]
        assert found == pytest.approx(expected, abs=1e-5)
    await stack.settled()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_pairs_are_scored_one_with_many_and_each_with_each(stack: Stack, own: Own, path: str) -> None:
    answer = await asked(stack, path, text_1=QUERY, text_2=DOCUMENTS)
    assert [each["score"] for each in answer["data"]] == pytest.approx(own.scores(QUERY, DOCUMENTS), abs=1e-5)
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(at, "score") for at in range(5)]
    assert (answer["object"], answer["id"][:6]) == ("list", "score-")
    each = await asked(stack, path, text_1=DOCUMENTS[:2], text_2=DOCUMENTS[2:4], use_activation=False)
    logits = [float(own.logits(*DOCUMENTS[at : at + 3 : 2])) for at in (0, 1)]
    assert [one["score"] for one in each["data"]] == pytest.approx(logits, abs=1e-4)


async def test_a_pair_is_cut_at_its_end(stack: Stack, own: Own) -> None:
    ids = own.tokenizer(QUERY, DOCUMENTS[0]).input_ids[:40]
    with torch.inference_mode():
        expected = float(own.model(torch.tensor([ids])).logits.sigmoid())
    answer = await asked(stack, "/v1/score", text_1=QUERY, text_2=DOCUMENTS[0], truncate_prompt_tokens=40)
    assert answer["data"][0]["score"] == pytest.approx(expected, abs=1e-5)
    assert answer["usage"]["prompt_tokens"] == 40
    long = {"query": QUERY, "documents": ["a", "b" * 300]}
    response = await stack.post({"model": "demo", **long}, "/v1/rerank")
    error = response.json()["error"]
    assert (error["error_code"], error["param"]) == ("context_length_exceeded", "documents")
    assert "documents 1, which has" in error["message"]


async def test_a_model_with_a_head_completes_nothing_and_says_so(stack: Stack) -> None:
    found = await refusal(stack, "/v1/completions", prompt="Once")
    assert "must name a model that completes text; found demo, whose checkpoint has a classification head" in found


async def test_texts_get_a_probability_for_each_label(tmp_path: Path) -> None:
    save_classifier("llama", tmp_path, labels=LABELS, tie_word_embeddings=False)
    own = Own(tmp_path)
    async with running_stack(num_replicas=1, path=str(tmp_path), adapters=None) as stack:
        for path in "/classify", "/v1/classify":
            answer = await asked(stack, path, input=DOCUMENTS)
            for text, each in zip(DOCUMENTS, answer["data"], strict=True):
                expected = own.logits(text).softmax(dim=-1)
                assert each["probs"] == pytest.approx(expected.tolist(), abs=1e-5)
                assert (each["label"], each["num_classes"]) == (LABELS[int(expected.argmax())], 3)
        ids = own.tokenizer(DOCUMENTS[0]).input_ids
        answer = await asked(stack, "/classify", input=ids, use_activation=False)
        assert answer["data"][0]["probs"] == pytest.approx(own.logits(DOCUMENTS[0]).tolist(), abs=1e-4)
        assert answer["usage"]["prompt_tokens"] == len(ids)
        found = await refusal(stack, "/v1/rerank", query="a", documents=["b"])
        assert "has one label, which is the score; found demo, whose head has 3" in found


async def test_without_a_head_a_score_is_the_cosine_of_embeddings() -> None:
    async with running_stack(num_replicas=1) as stack:
        embedded = await asked(stack, "/v1/embeddings", input=[QUERY, *DOCUMENTS])
        query, *documents = (torch.tensor(each["embedding"]) for each in embedded["data"])
        cosines = [float(torch.cosine_similarity(query, each, dim=0)) for each in documents]
        scored = await asked(stack, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
        assert [each["score"] for each in scored["data"]] == pytest.approx(cosines, abs=1e-4)
        assert scored["usage"] == embedded["usage"], "the query is embedded once"
        ranked = await asked(stack, "/v1/rerank", query=QUERY, documents=DOCUMENTS, model="demo:pirate", top_n=1)
        assert ranked["results"][0]["index"] in range(5)
        found = await refusal(stack, "/v1/classify", input="a")
        assert "must name a model with a classification head; found demo, whose checkpoint has none" in found
