"""Prompts share the names of their prefixes exactly as far as they agree and may share keys and values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.core.names import ModelRef
from serve_app.core.prefixes import ENDS, prefixes_of
from serve_app.core.prompt import Conversation, Image, Prompt
from serve_app.core.request import GenerationRequest


def of(*parts: str | tuple[int, ...] | Image, **changes: object) -> GenerationRequest:
    request = GenerationRequest(request_id="r", model=ModelRef(base="tiny"), prompt=Prompt(parts=parts))
    return replace(request, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_shared", [0, 255, 256, 1000, 5000, 99_999])
def test_names_are_shared_as_far_as_texts_agree(num_shared: int) -> None:
    shared = "ab" * 50_000
    one, two = (prefixes_of(of(shared[:num_shared] + tail * 1000)).names for tail in "xy")
    num_same = sum(first == second for first, second in zip(one, two, strict=True))
    assert num_same == sum(end <= num_shared for end in ENDS)
    assert one[:num_same] == two[:num_same]


def test_a_long_prompt_has_few_names() -> None:
    assert len(prefixes_of(of("x" * 8000)).names) < 24
    assert len(prefixes_of(of("x" * 10_000_000)).names) < 100
    assert prefixes_of(of("x" * 255)) == (255, ())


def test_base_adapter_version_and_salt_are_in_every_name() -> None:
    request = of("x" * 1000)
    others = [
        replace(request, model=ModelRef(base="other")),
        replace(request, model=ModelRef(base="tiny", adapter="sql", version="v1")),
        replace(request, cache_salt="tenant a\n"),
    ]
    found = [prefixes_of(each).names for each in (request, *others)]
    assert len({name for names in found for name in names}) == sum(map(len, found))


def test_an_adapter_with_the_keys_of_its_base_shares_them() -> None:
    adapter = ModelRef(base="tiny", adapter="head", version="v1", prefix_version="")
    assert prefixes_of(of("x" * 1000, model=adapter)).names == prefixes_of(of("x" * 1000)).names


def test_token_ids_images_and_lone_surrogates_have_names() -> None:
    ids = tuple(range(1000))
    assert prefixes_of(of(ids)).names[:5] == prefixes_of(of((*ids[:500], 7))).names[:5]
    images = [Image(data=data, name="image") for data in (b"1", b"2")]
    one, two = (prefixes_of(of(image, "x" * 1000)).names for image in images)
    assert not set(one) & set(two)
    assert prefixes_of(of("\ud800" * 100)).num_bytes == 300


def test_a_chat_that_goes_on_shares_what_was_said() -> None:
    said = '{"messages":[{"role":"user","content":"' + "x" * 2000
    first = of(conversation=Conversation(source=said + '"}]}'))
    second = of(conversation=Conversation(source=said + '"},{"role":"assistant","content":"y"}]}'))
    assert prefixes_of(first).names == prefixes_of(second).names[: len(prefixes_of(first).names)]
    assert len(prefixes_of(first).names) == 7


def test_a_prompt_that_uses_no_cache_has_no_names() -> None:
    assert prefixes_of(of("x" * 1000, uses_cache=False)) == (1000, ())
