"""The bodies of /v1/rerank, /v1/score and /v1/classify, and their answers: scores of texts, and of pairs of texts."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import mul
from typing import Any, ClassVar, Self

from serve_app.api.dialects import Dialect
from serve_app.api.embeddings import EMBEDDINGS, EmbeddingRequest, Inputs, read_values, table_of, usage_of
from serve_app.api.forms.form import FLAG, Integer, Parameter, Terms, Text, Value
from serve_app.api.forms.names import NAME
from serve_app.api.forms.schema import Schema, array, either, record
from serve_app.api.limits import WireLimits
from serve_app.api.parameters import Disposition, NotYet, Renamed
from serve_app.api.responses import ResponseHead
from serve_app.core.delta import Recording, Usage
from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import Prompt
from serve_app.core.request import Activation, EmbeddingForm, HeadForm

TEXT = Text(min_chars=1, max_chars=lambda terms: terms.limits.max_prompt_chars)


class Texts:
    """A text or a list of them, each a string or an object with the member `text`."""

    def words(self, terms: Terms) -> str:
        return f"{_one_text(terms)}, or a list of 1 to {terms.limits.max_inputs} of them"

    def schema(self, terms: Terms) -> Schema:
        one = TEXT.schema(terms), record({"text": TEXT.schema(terms)}, is_closed=True)
        return either(*one, array(either(*one), least=1, most=terms.limits.max_inputs))

    def read(self, value: Value) -> tuple[str, ...]:
        allowed = self.words(value.terms)
        if not isinstance(value.sent, list):
            return (_read_text(value, allowed),)
        elements = value.elements(value.terms.limits.max_inputs, allowed)
        if not elements:
            raise value.refused(allowed)
        one = _one_text(value.terms)
        return tuple(
            _read_text(replace(value, name=f"{value.name}[{at}]", sent=each), one) for at, each in enumerate(elements)
        )


def _one_text(terms: Terms) -> str:
    return f'{TEXT.words(terms)}, an object with such a "text"'


def _read_text(value: Value, allowed: str) -> str:
    match value.sent:
        case str():
            return TEXT.read(value)
        case {"text": text, **others} if not others:
            return TEXT.read(replace(value, name=f"{value.name}.text", sent=text))
        case _:
            raise value.refused(allowed)


COMMON: Mapping[str, Parameter] = {
    "model": Parameter(
        NAME, "A base model, an adapter of one that embeds texts, or an alias; the only one where one is served."
    ),
    "use_activation": Parameter(FLAG, "False gives the logits of a classification head as they are."),
    **{name: EMBEDDINGS[name] for name in ("truncate_prompt_tokens", "truncation_side", "user")},
}
OF_PAIRS: Mapping[str, Parameter] = {
    **COMMON,
    "truncation_side": Parameter(
        COMMON["truncation_side"].form,
        "Where a pair loses what `truncate_prompt_tokens` does not keep: at its end, unless `left` is sent.",
    ),
}
RERANK: Mapping[str, Parameter] = {
    "query": Parameter(TEXT, "What documents are compared with."),
    "documents": Parameter(Texts(), "What is ranked."),
    "top_n": Parameter(Integer(low=0, besides="; 0 is all"), "Documents returned at most, the best ones."),
    "return_documents": Parameter(FLAG, "Each result has its document; false leaves it out."),
    **OF_PAIRS,
}
SCORE: Mapping[str, Parameter] = {
    "text_1": Parameter(Texts(), "The first text of each pair; one alone is that of every pair."),
    "text_2": Parameter(Texts(), "The second text of each pair."),
    **OF_PAIRS,
}
CLASSIFY: Mapping[str, Parameter] = {
    "input": Parameter(Inputs(), "What is classified; every input of a list by itself."),
    **COMMON,
}
NOT_HERE = (
    "chat_template_kwargs", "instruction", "max_chunks_per_doc", "max_tokens_per_doc", "max_tokens_per_query",
    "rank_fields",
)  # fmt: skip
"""Names of Jina, Cohere and vLLM that would change an answer."""


def _table(parameters: Mapping[str, Parameter]) -> Mapping[str, Disposition]:
    besides: Mapping[str, Disposition] = {**dict.fromkeys(NOT_HERE, NotYet()), "activation": Renamed("use_activation")}
    return {**table_of(parameters), **besides}


_RERANK, _SCORE, _CLASSIFY = _table(RERANK), _table(SCORE), _table(CLASSIFY)


class ClassifyRequest(EmbeddingRequest):
    """Texts whose scores for each label of a classification head are wanted.

    use_activation: else the scores are logits
    """

    use_activation: bool = True

    id_prefix: ClassVar[str] = "classify"

    @property
    def needs_head(self) -> bool:
        return True

    def answer(
        self, head: ResponseHead, form: EmbeddingForm, recordings: Sequence[Recording], usage: Usage
    ) -> dict[str, object]:
        assert isinstance(form, HeadForm), "it was lowered with one"
        data = []
        for index, each in enumerate(recordings):
            scores = self._activated(each, form)
            label = form.labels[scores.index(max(scores))]
            data.append({"index": index, "label": label, "probs": scores, "num_classes": len(scores)})
        return {**_head(head), "data": data, "usage": usage_of(usage)}

    def _activated(self, recording: Recording, form: HeadForm) -> list[float]:
        return activated(numbers_of(recording), form.activation if self.use_activation else "none")


class ScoreRequest(ClassifyRequest):
    """Pairs of texts, each of which gets a score: of a classification head, else the cosine of their embeddings.

    For a head a prompt is a pair, and otherwise one of all the texts, each of which is embedded once.
    """

    pairs: tuple[tuple[str, str], ...]

    id_prefix: ClassVar[str] = "score"
    prompt_name: ClassVar[str] = "text_2"

    @property
    def needs_head(self) -> bool:
        return len(self.prompts[0].parts) > 1

    def apart(self) -> Self:
        """Return the same request for a model without a head."""
        texts = dict.fromkeys([second for _, second in self.pairs] + [first for first, _ in self.pairs])
        return self.model_copy(update={"prompts": tuple(Prompt(parts=(text,)) for text in texts)})

    def answer(
        self, head: ResponseHead, form: EmbeddingForm, recordings: Sequence[Recording], usage: Usage
    ) -> dict[str, object]:
        scores = self._scores(form, recordings)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return {**_head(head), "data": data, "usage": usage_of(usage)}

    def _scores(self, form: EmbeddingForm, recordings: Sequence[Recording]) -> list[float]:
        """Return the score of each pair, in order."""
        if isinstance(form, HeadForm):
            return [self._activated(each, form)[0] for each in recordings]
        found = {prompt.text: numbers_of(each) for prompt, each in zip(self.prompts, recordings, strict=True)}
        return [cosine(found[first], found[second]) for first, second in self.pairs]


class RerankRequest(ScoreRequest):
    """A query and the documents that are ranked by it.

    top_n: 0 returns all of them
    """

    top_n: int = 0
    return_documents: bool = True

    id_prefix: ClassVar[str] = "rerank"
    prompt_name: ClassVar[str] = "documents"

    def answer(
        self, head: ResponseHead, form: EmbeddingForm, recordings: Sequence[Recording], usage: Usage
    ) -> dict[str, object]:
        scores = self._scores(form, recordings)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.top_n or None]
        results = [{"index": index, **self._document(index), "relevance_score": scores[index]} for index in best]
        return {"id": head.id, "model": head.model, "results": results, "usage": usage_of(usage)}

    def _document(self, index: int) -> dict[str, object]:
        return {"document": {"text": self.pairs[index][1]}} if self.return_documents else {}


def read_classify(
    members: Mapping[str, object], limits: WireLimits, dialect: Dialect, *, model: Callable[[], str]
) -> ClassifyRequest:
    """Return the request of these members. model: asked where none was sent

    Raises InvalidRequest.
    """
    terms = Terms(limits=limits, dialect=dialect)
    values = read_values(members, _CLASSIFY, terms, required=("input",), model=model)
    return ClassifyRequest(prompts=values.pop("input"), **values)


def read_score(
    members: Mapping[str, object], limits: WireLimits, dialect: Dialect, *, model: Callable[[], str]
) -> ScoreRequest:
    """Return the request of these members, its prompts as pairs. Raises as `read_classify`."""
    terms = Terms(limits=limits, dialect=dialect)
    values = read_values(members, _SCORE, terms, required=("text_1", "text_2"), model=model)
    firsts, seconds = values.pop("text_1"), values.pop("text_2")
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        must = "hold as many texts as text_1, if that holds more than one"
        raise InvalidRequest.refusing("text_2", must=must, found=f"{len(seconds)} beside {len(firsts)}")
    return ScoreRequest(**_paired(zip(firsts, seconds, strict=True), values))


def read_rerank(
    members: Mapping[str, object], limits: WireLimits, dialect: Dialect, *, model: Callable[[], str]
) -> RerankRequest:
    """Return the request of these members, its prompts as pairs of query and document. Raises as `read_classify`."""
    terms = Terms(limits=limits, dialect=dialect)
    values = read_values(members, _RERANK, terms, required=("query", "documents"), model=model)
    query, documents = values.pop("query"), values.pop("documents")
    return RerankRequest(**_paired(((query, each) for each in documents), values))


def _paired(pairs: Iterable[tuple[str, str]], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a request of pairs."""
    kept = tuple(pairs)
    return {"truncation_side": "right", **values, "pairs": kept, "prompts": tuple(Prompt(parts=pair) for pair in kept)}


def activated(logits: Sequence[float], activation: Activation) -> list[float]:
    """Return the scores of these logits."""
    match activation:
        case "none":
            return list(logits)
        case "sigmoid":
            return [_sigmoid(each) for each in logits]
        case "softmax":
            highest = max(logits)
            weights = [math.exp(each - highest) for each in logits]
            return [each / sum(weights) for each in weights]


def _sigmoid(logit: float) -> float:
    small = math.exp(-abs(logit))
    return (1.0 if logit >= 0 else small) / (1.0 + small)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine of two vectors; 0 if one of them is all zeros."""
    product = sum(map(mul, first, second))
    lengths = math.hypot(*first) * math.hypot(*second)
    return product / lengths if lengths else 0.0


def numbers_of(recording: Recording) -> tuple[float, ...]:
    """Return the numbers of a recording of one vector."""
    return struct.unpack(f"<{len(recording.hidden_states) // 4}f", recording.hidden_states)


def _head(head: ResponseHead) -> dict[str, object]:
    return {"id": head.id, "object": "list", "created": head.created, "model": head.model}
