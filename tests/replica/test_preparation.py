"""What cannot fit is refused before it is cut into tokens; what is cut costs a bounded amount."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, normalizers

from serve_app.core.errors import ContextOverflow, InvalidRequest
from serve_app.core.prompt import Prompt
from serve_app.core.request import (
    ContextParams,
    DryParams,
    GenerationRequest,
    SamplingParams,
    StopParams,
    UnencodedParams,
)
from serve_app.replica.engine import PreparedRequest
from serve_app.replica.preparation import HEAD_CHARS_PER_TOKEN, HEAD_MARGIN, Preparation
from serve_app.text.tokenizer import TextTokenizer
from tests.engine.conftest import DEMO
from tests.engine.harness import request

CONTEXT = 64
TRUNCATES = ContextParams(truncates_prompt=True)


class CountingTokenizer(TextTokenizer):
    """Notes how many characters it was given to cut."""

    num_chars = 0

    def count(self, text: str) -> int:
        self.num_chars += len(text)
        return super().count(text)

    def encode(self, prompt: Prompt) -> list[int]:
        self.num_chars += sum(len(part) for part in prompt.parts)
        return super().encode(prompt)


def counting(*, deletes: bool = False) -> CountingTokenizer:
    """deletes: strips white space, so that its vocabulary bounds no text"""
    inner = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    if deletes:
        inner.normalizer = normalizers.Strip()
    return CountingTokenizer(inner, vocab_size=2048)


def preparation(tokenizer: TextTokenizer, *, max_chars: int | None = None) -> Preparation:
    return Preparation(tokenizer, model_name="toy", max_model_len=CONTEXT, max_chars=max_chars)


def prepared(preparation: Preparation, request: GenerationRequest) -> PreparedRequest:
    """As the service does it: the length first."""
    preparation.length.check(request)
    return preparation.prepare(request)


def asked(*parts: str | tuple[int, ...], **changes: object) -> GenerationRequest:
    return replace(request("a", max_tokens=4), prompt=Prompt(parts=parts), **changes)  # type: ignore[arg-type]


def test_a_text_that_no_tokens_can_bring_into_the_context_is_refused_before_it_is_cut() -> None:
    tokenizer = counting()
    longest = CONTEXT * (tokenizer.chars_per_token or 0)
    with pytest.raises(ContextOverflow, match=f"has 4000000 characters, of which at most {longest} can fit") as refusal:
        prepared(preparation(tokenizer), asked("x" * 4_000_000))
    assert tokenizer.num_chars == 0
    assert refusal.value.facts == {"n_prompt_chars": 4_000_000, "max_prompt_chars": longest, "n_ctx": CONTEXT}


def test_token_ids_beside_a_text_leave_less_room_for_it() -> None:
    tokenizer = counting()
    chars_per_token = tokenizer.chars_per_token or 0
    with pytest.raises(ContextOverflow, match=f"at most {4 * chars_per_token} can fit"):
        prepared(preparation(tokenizer), asked((5,) * (CONTEXT - 4), "x" * (4 * chars_per_token + 1)))
    assert tokenizer.num_chars == 0


def test_a_list_of_ids_longer_than_the_context_is_refused_by_its_length() -> None:
    tokenizer = counting()
    with pytest.raises(ContextOverflow, match="has 1000000 tokens"):
        prepared(preparation(tokenizer), asked((5,) * 1_000_000))
    assert tokenizer.num_chars == 0


def test_of_a_text_that_a_vocabulary_cannot_judge_only_the_beginning_is_cut() -> None:
    tokenizer = counting(deletes=True)
    assert tokenizer.chars_per_token is None
    with pytest.raises(ContextOverflow, match="of which 1024 alone are 1024 tokens"):
        prepared(preparation(tokenizer), asked("a1" * 100_000))
    assert tokenizer.num_chars == HEAD_CHARS_PER_TOKEN * CONTEXT
    assert HEAD_MARGIN * CONTEXT < 1024


def test_a_text_that_shrinks_into_the_context_is_taken_however_it_begins() -> None:
    tokenizer = counting(deletes=True)
    sequence = prepared(preparation(tokenizer), asked(" " * 50_000 + "Once upon a time"))
    assert tokenizer.decode(sequence.token_ids) == "Once upon a time"


def test_where_nothing_bounds_a_text_the_configured_bound_does() -> None:
    tokenizer = counting(deletes=True)
    with pytest.raises(ContextOverflow, match="has 5001 characters, of which at most 5000"):
        prepared(preparation(tokenizer, max_chars=5000), asked(" " * 5001))
    assert tokenizer.num_chars == 0


def test_the_longest_texts_that_fit_are_taken() -> None:
    tokenizer = counting()
    texts = sorted((tokenizer.token_text(id_) * (CONTEXT - 1) for id_ in range(300, 2048)), key=len)
    longest = [text for text in texts[-200:] if tokenizer.count(text) == CONTEXT - 1]
    assert longest
    for text in longest:
        sequence = prepared(preparation(tokenizer), asked(text))
        assert len(sequence.token_ids) == CONTEXT - 1


def test_a_prompt_to_be_truncated_keeps_its_end_and_says_what_it_lost() -> None:
    tokenizer = counting()
    text = "Once upon a time there was a fox. " * 500
    whole = tokenizer.encode(Prompt(parts=(text,)))
    sequence = prepared(preparation(tokenizer), asked(text, context=TRUNCATES))
    assert sequence.token_ids == whole[-len(sequence.token_ids) :]
    assert sequence.num_dropped_tokens == len(whole) - len(sequence.token_ids)


def test_a_prompt_to_be_truncated_is_cut_up_to_the_configured_length() -> None:
    tokenizer = counting()
    bounded = preparation(tokenizer, max_chars=5000)
    prepared(bounded, asked("x" * 5000, context=TRUNCATES))
    with pytest.raises(ContextOverflow, match="has 5001 characters, of which at most 5000 are cut into tokens"):
        prepared(bounded, asked("x" * 5001, context=TRUNCATES))


@pytest.mark.parametrize(("ids", "stray"), [((1, -1, 2), -1), ((1, 2048, 5000), 2048), ((3000,), 3000)])
def test_the_first_id_outside_the_vocabulary_is_named(ids: tuple[int, ...], stray: int) -> None:
    with pytest.raises(InvalidRequest, match=f"from 0 to 2047, .*found {stray}. .prompt 0."):
        prepared(preparation(counting()), asked(ids))


class CountedReads(Items[int]):
    """Special tokens, so that nothing visible ends a search; counts how often one is looked at."""

    num_reads = 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, at: object) -> int:  # type: ignore[override]
        self.num_reads += 1
        return 0


def test_a_prompt_is_looked_through_once_for_all_samples() -> None:
    prompt_ids, tokenizer = CountedReads(), counting()
    assert 0 in tokenizer.special_ids
    assert len(tokenizer.detokenizers(prompt_ids, 128)) == 128
    assert prompt_ids.num_reads == 1000


def test_biases_and_breakers_that_came_as_text_are_cut_like_texts_alone_and_behind_a_letter() -> None:
    tokenizer = counting()
    sampling = SamplingParams(logit_bias=((7, 1.0),), dry=DryParams(multiplier=1.0, breakers=((9,),)))
    unencoded = UnencodedParams(logit_bias=((" fox", 2.0), ("time", 3.0)), dry_breakers=("\n", " fox", ":"))
    sequence = prepared(
        preparation(tokenizer), asked("Once", sampling=sampling, unencoded=unencoded, stop=StopParams(max_tokens=1))
    )
    reference = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    found = sequence.request.sampling
    fox, time = (reference.encode(text).ids for text in (" fox", "time"))
    assert found.logit_bias == ((7, 1.0), *((id_, 2.0) for id_ in fox), *((id_, 3.0) for id_ in time))
    letter = reference.encode("a").ids
    ways: list[tuple[int, ...]] = []
    for text in unencoded.dry_breakers:
        anchored = reference.encode("a" + text).ids
        ways.append(tuple(reference.encode(text).ids))
        ways += [tuple(anchored[len(letter) :])] if anchored[: len(letter)] == letter else []
    assert found.dry is not None
    assert found.dry.breakers == ((9,), *dict.fromkeys(way for way in ways if way))
