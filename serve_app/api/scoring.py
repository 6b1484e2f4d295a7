"""The bodies of /v1/rerank, /v1/score and /v1/classify, and their answers: scores of texts, and of pairs of texts."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import mul
from typing import Any, ClassVar, Self

from serve_app.api.embeddings import EMBEDDINGS, EmbeddingRequest, Inputs, table_of
from serve_app.api.forms.form import FLAG, Integer, Parameter, Terms, Text, Value
from serve_app.api.forms.names import NAME
from serve_app.api.forms.schema import Schema, array, either, record
from serve_app.api.parameters import Disposition, NotYet, Renamed
from serve_app.api.paths import Path
from serve_app.api.responses import ResponseHead
from serve_app.core.delta import Recording, Usage
from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import Prompt
from serve_app.core.request import EmbeddingForm, HeadForm

MAX_PAIRED_CHARS = 1 << 24
"""As many as a body may have: the query of many documents counts with each."""
TEXT = Text(min_chars=1, max_chars=lambda terms: terms.limits.max_prompt_chars)


class Texts:
    """A text or a list of them, each a string or an object with the member `text`."""

    def words(self, terms: Terms) -> str:
        return f'{TEXT.words(terms)}, an object with such a "text", or a list of 1 to {terms.limits.max_inputs} of them'

    def schema(self, terms: Terms) -> Schema:
        one = TEXT.schema(terms), record({"text": TEXT.schema(terms)}, is_closed=True)
        return either(*one, array(either(*one), least=1, most=terms.limits.max_inputs))

    def read(self, value: Value) -> tuple[str, ...]:
        if not isinstance(value.sent, list):
            return (self._text(value),)
        elements = value.elements(value.terms.limits.max_inputs, self.words(value.terms), is_needed=True)
        return tuple(self._text(value.part(at, each)) for at, each in enumerate(elements))

    def _text(self, value: Value) -> str:
        match value.sent:
            case str():
                return TEXT.read(value)
            case {"text": text, **others} if not others:
                return TEXT.read(replace(value, name=f"{value.name}.text", sent=text))
            case _:
                raise value.refused(self.words(value.terms))


COMMON: Mapping[str, Parameter] = {
    "model": Parameter(
        NAME, "A base model, an adapter of one that embeds texts, or an alias; the only one where one is served."
    ),
    "use_activation": Parameter(FLAG, "False gives the logits of a classification head as they are."),
    **{name: EMBEDDINGS[name] for name in ("truncate_prompt_tokens", "truncation_side", "user")},
}
RERANK: Mapping[str, Parameter] = {
    "query": Parameter(TEXT, "What documents are compared with."),
    "documents": Parameter(Texts(), "What is ranked."),
    "top_n": Parameter(Integer(low=0, besides="; 0 is all"), "Documents returned at most, the best ones."),
    "return_documents": Parameter(FLAG, "Each result has its document; false leaves it out."),
    **COMMON,
}
SCORE: Mapping[str, Parameter] = {
    "text_1": Parameter(Texts(), "The first text of each pair; one alone is that of every pair."),
    "text_2": Parameter(Texts(), "The second text of each pair."),
    **COMMON,
}
CLASSIFY: Mapping[str, Parameter] = {
    "input": Parameter(Inputs(), "What is classified; every input of a list by itself."),
    **COMMON,
    "model": Parameter(
        NAME, "A base model with a classification head, or an alias of one; the only one that is served."
    ),
}
NOT_HERE = (
    "chat_template_kwargs", "instruction", "max_chunks_per_doc", "max_tokens_per_doc", "max_tokens_per_query",
    "rank_fields",
)  # fmt: skip
"""Names of Jina, Cohere and vLLM that would change an answer."""
VLLM_PAIRS = {
    **dict.fromkeys(("queries", "data_1"), Renamed("text_1")),
    **dict.fromkeys(("documents", "items", "data_2"), Renamed("text_2")),
}
"""What vLLM also calls the two texts of a pair."""


def _table(parameters: Mapping[str, Parameter]) -> Mapping[str, Disposition]:
    besides: Mapping[str, Disposition] = {**dict.fromkeys(NOT_HERE, NotYet()), "activation": Renamed("use_activation")}
    return {**table_of(parameters), **besides}


class ClassifyRequest(EmbeddingRequest):
    """Texts whose scores for each label of a classification head are wanted.

    use_activation: else the scores are logits
    """

    use_activation: bool = True

    id_prefix: ClassVar[str] = "classify"
    table: ClassVar[Mapping[str, Disposition]] = _table(CLASSIFY)
    described: ClassVar[tuple[str, str, str]] = ("Classify texts", "ClassifyRequest", "Classes")

    @property
    def needs_head(self) -> bool:
        return True

    def answer(
        self, head: ResponseHead, form: EmbeddingForm, recordings: Sequence[Recording], usage: Usage
    ) -> dict[str, object]:
        return {"id": head.id, "created": head.created, **super().answer(head, form, recordings, usage)}

    def _items(self, form: EmbeddingForm, recordings: Sequence[Recording]) -> list[dict[str, object]]:
        assert isinstance(form, HeadForm), "it was lowered with one"
        scored = [_numbers(each) for each in recordings]
        return [
            {"index": at, "label": form.labels[each.index(max(each))], "probs": each, "num_classes": len(each)}
            for at, each in enumerate(scored)
        ]


class ScoreRequest(ClassifyRequest):
    """Pairs of texts, each of which gets a score: of a classification head, else the cosine of their embeddings.

    For a head a prompt is a pair, and otherwise one of all the texts, each of which is embedded once.
    """

    pairs: tuple[tuple[str, str], ...]

    id_prefix: ClassVar[str] = "score"
    prompt_name: ClassVar[str] = "text_2"
    table: ClassVar[Mapping[str, Disposition]] = {**_table(SCORE), **VLLM_PAIRS}
    required: ClassVar[tuple[str, ...]] = ("text_1", "text_2")
    described: ClassVar[tuple[str, str, str]] = ("Score pairs of texts", "ScoreRequest", "Scores")

    @classmethod
    def _fields_of(cls, values: dict[str, Any]) -> dict[str, Any]:
        pairs = cls._pairs_of(values)
        num_chars = sum(len(first) + len(second) for first, second in pairs)
        if num_chars > MAX_PAIRED_CHARS:
            must = f"make pairs of at most {MAX_PAIRED_CHARS} characters together, each text counted with each pair"
            raise InvalidRequest.refusing(cls.prompt_name, must=must, found=f"{num_chars} in {len(pairs)} pairs")
        return {"truncation_side": "right", **values, "pairs": pairs, "prompts": tuple(Prompt(parts=p) for p in pairs)}

    @classmethod
    def _pairs_of(cls, values: dict[str, Any]) -> tuple[tuple[str, str], ...]:
        """Take the texts out of the values, in pairs. Raises InvalidRequest."""
        firsts, seconds = values.pop("text_1"), values.pop("text_2")
        if len(firsts) == 1:
            firsts *= len(seconds)
        if len(firsts) != len(seconds):
            must = "hold as many texts as text_1, if that holds more than one"
            raise InvalidRequest.refusing("text_2", must=must, found=f"{len(seconds)} beside {len(firsts)}")
        return tuple(zip(firsts, seconds, strict=True))

    @property
    def needs_head(self) -> bool:
        return len(self.prompts[0].parts) > 1

    def apart(self) -> Self:
        """Return the same request for a model without a head."""
        texts = dict.fromkeys([second for _, second in self.pairs] + [first for first, _ in self.pairs])
        return self.model_copy(update={"prompts": tuple(Prompt(parts=(text,)) for text in texts)})

    def _items(self, form: EmbeddingForm, recordings: Sequence[Recording]) -> list[dict[str, object]]:
        scores = self._scores(recordings)
        return [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]

    def _scores(self, recordings: Sequence[Recording]) -> list[float]:
        """Return the score of each pair, in order. Embeddings have the length 1."""
        if self.needs_head:
            return [_numbers(each)[0] for each in recordings]
        found = {prompt.text: _numbers(each) for prompt, each in zip(self.prompts, recordings, strict=True)}
        return [sum(map(mul, found[first], found[second])) for first, second in self.pairs]


class RerankRequest(ScoreRequest):
    """A query and the documents that are ranked by it.

    top_n: 0 returns all of them
    """

    top_n: int = 0
    return_documents: bool = True

    id_prefix: ClassVar[str] = "rerank"
    prompt_name: ClassVar[str] = "documents"
    table: ClassVar[Mapping[str, Disposition]] = _table(RERANK)
    required: ClassVar[tuple[str, ...]] = ("query", "documents")
    described: ClassVar[tuple[str, str, str]] = ("Rank documents by a query", "RerankRequest", "Ranking")

    @classmethod
    def _pairs_of(cls, values: dict[str, Any]) -> tuple[tuple[str, str], ...]:
        query, documents = values.pop("query"), values.pop("documents")
        return tuple((query, each) for each in documents)

    def answer(
        self, head: ResponseHead, form: EmbeddingForm, recordings: Sequence[Recording], usage: Usage
    ) -> dict[str, object]:
        whole = super().answer(head, form, recordings, usage)
        return {"id": head.id, "model": head.model, "results": whole["data"], "usage": whole["usage"]}

    def _items(self, form: EmbeddingForm, recordings: Sequence[Recording]) -> list[dict[str, object]]:
        scores = self._scores(recordings)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.top_n or None]
        return [{"index": index, **self._document(index), "relevance_score": scores[index]} for index in best]

    def _document(self, index: int) -> dict[str, object]:
        return {"document": {"text": self.pairs[index][1]}} if self.return_documents else {}


INPUT_ROUTES: Mapping[Path, type[EmbeddingRequest]] = {
    Path.EMBEDDINGS: EmbeddingRequest,
    **dict.fromkeys((Path.RERANK, Path.V1_RERANK, Path.V2_RERANK), RerankRequest),
    **dict.fromkeys((Path.SCORE, Path.V1_SCORE), ScoreRequest),
    **dict.fromkeys((Path.CLASSIFY, Path.V1_CLASSIFY), ClassifyRequest),
}
"""What the body of each route is read as that embeds or scores inputs."""


def _numbers(recording: Recording) -> tuple[float, ...]:
    """Return the numbers of a recording of one vector."""
    return struct.unpack(f"<{len(recording.hidden_states) // 4}f", recording.hidden_states)
