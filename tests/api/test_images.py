"""Images in a body: their forms, their places, and what is refused before anything is decoded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.api.dialects import FIREWORKS
from serve_app.api.limits import WireLimits
from serve_app.core.errors import InvalidRequest
from serve_app.core.prompt import Image
from tests.parsing import parse_completion
from tests.pictures import encoded, file_of, picture, sent

LIMITS = WireLimits(max_images=3, max_image_bytes=2000, max_prompts=4)
PNG = file_of(picture(1))
JPEG = file_of(picture(1), "JPEG")


def parts(**members: Any) -> list[list[Any]]:
    """Each prompt's parts, images as their bytes."""
    request = parse_completion(json.dumps({"model": "tiny", **members}).encode(), LIMITS)
    return [[part.data if isinstance(part, Image) else part for part in each.parts] for each in request.prompts]


def refusal(**members: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parts(**members)
    return caught.value


@pytest.mark.parametrize(
    "text",
    [
        encoded(PNG),
        f"data:image/png;base64,{encoded(PNG)}",
        f"DATA:image/PNG;base64,{encoded(PNG)}",
        f"data:image/png;charset=utf-8;base64,{encoded(PNG)}",
        f"image/png,{encoded(PNG)}",  # as Fireworks words it: MIME_TYPE,<base64 encoded str>
    ],
)
def test_an_image_is_base64_bare_or_with_its_kind(text: str) -> None:
    assert parts(prompt="a <image> b", images=[text]) == [["a ", PNG, " b"]]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_files_of_each_kind_are_known_by_their_first_bytes(kind: str) -> None:
    data = file_of(picture(1), kind)
    for text in (encoded(data), f"data:image/{kind.lower()};base64,{encoded(data)}"):
        assert parts(prompt="<image>", images=[text]) == [[data]]


def test_images_stand_where_their_markers_do() -> None:
    one, two = sent(1), sent(2)
    first, second = file_of(picture(1)), file_of(picture(2))
    assert parts(prompt="<image><image> differ", images=[one, two]) == [[first, second, " differ"]]
    assert parts(prompt=["a<image>", "b", "<image>c"], images=[[one], [], [two]]) == [
        ["a", first],
        ["b"],
        [second, "c"],
    ]
    assert parts(prompt=[5, "a<image>", 6], images=[one]) == [[(5,), "a", first, (6,)]]
    assert parts(prompt=["a<image>"], images=[[one]]) == [["a", first]]


def test_llama_cpps_object_has_images_of_its_own() -> None:
    one, two = encoded(PNG), sent(2)
    asked = {"prompt_string": "a <__media__> b", "multimodal_data": [one]}
    assert parts(prompt=asked) == [["a ", PNG, " b"]]
    assert parts(prompt=[asked, "c"]) == [["a ", PNG, " b"], ["c"]]
    assert parts(prompt={"prompt_string": "<image>", "multimodal_data": [two]}) == [[file_of(picture(2))]]
    assert parts(prompt={"prompt_string": "a <__media__>", "multimodal_data": []}) == [["a <__media__>"]]


def test_without_images_a_marker_is_text_and_empty_lists_are_nothing() -> None:
    for images in (None, [], [[]], [[], [], []]):
        assert parts(prompt="an <image> tag", images=images) == [["an <image> tag"]]


@pytest.mark.parametrize(
    ("members", "param", "words"),
    [
        ({"images": ["https://example.com/a.png"]}, "images[0]", "No address is ever fetched"),
        ({"images": ["file:///etc/passwd"]}, "images[0]", "No address is ever fetched"),
        ({"images": ["FILE:/etc/passwd"]}, "images[0]", "No address is ever fetched"),
        ({"images": ["data:image/jpeg;base64," + encoded(PNG)]}, "images[0]", "image/jpeg"),
        ({"images": ["data:text/html;base64," + encoded(b"<html>")]}, "images[0]", "PNG, JPEG, GIF or WebP"),
        ({"images": [encoded(b"BM" + bytes(60))]}, "images[0]", "PNG, JPEG, GIF or WebP"),
        ({"images": [""]}, "images[0]", "PNG, JPEG, GIF or WebP"),
        ({"images": [5]}, "images[0]", "found 5"),
        ({"images": [encoded(PNG)[:-3] + "*=="]}, "images[0]", "no base64"),
        ({"images": [encoded(PNG)[:-4] + "A"]}, "images[0]", "no base64"),
        ({"images": [encoded(PNG + bytes(2000))]}, "images[0]", "at most 2000 bytes"),
        ({"images": "x"}, "images", "a list of at most 3 images"),
        ({"images": [encoded(PNG)] * 4}, "images", "at most 3 images"),
        ({"images": [encoded(PNG)] * 2}, "images", "as many images as the prompt has <image> markers, which is 1"),
        ({"images": [encoded(PNG)], "prompt": "none"}, "images", "which is 0"),
        ({"images": [encoded(PNG)], "prompt": [[5, 6]]}, "images", "which is 0"),
        ({"images": [encoded(PNG)], "prompt": ["<image>", "<image>"]}, "images", "one for each of the 2 prompts"),
        ({"images": [[encoded(PNG)]], "prompt": ["<image>", "<image>"]}, "images", "2 in all"),
        ({"images": [[], [encoded(PNG)]], "prompt": ["<image>", "b"]}, "images[1]", "which is 0"),
        ({"images": [[encoded(PNG)], encoded(PNG)]}, "images[0]", "PNG, JPEG, GIF or WebP"),
        ({"images": [[encoded(PNG)] * 2] * 2, "prompt": ["<image><image>"] * 2}, "images", "at most 3 images"),
        (
            {"prompt": {"prompt_string": "a", "multimodal_data": [encoded(PNG)]}},
            "prompt.multimodal_data", "which is 0",
        ),
        ({"prompt": {"prompt_string": "a", "multimodal_data": "x"}}, "prompt.multimodal_data", "a list of images"),
        (
            {"prompt": {"prompt_string": "<image>", "multimodal_data": [encoded(PNG)]}, "images": [encoded(PNG)]},
            "images", "multimodal_data",
        ),
        (
            {"prompt": [{"prompt_string": "<image>" * 2, "multimodal_data": [encoded(PNG)] * 2}] * 2},
            "prompt", "at most 3 images in all",
        ),
    ],
)  # fmt: skip
def test_what_is_no_image_or_has_no_place_is_refused_by_name(members: dict[str, Any], param: str, words: str) -> None:
    error = refusal(**{"prompt": "a <image>", **members})
    assert error.param == param
    assert words in str(error)
    assert len(str(error)) < 500


def test_a_prompt_of_text_and_images_is_no_mixture_of_text_and_ids() -> None:
    body = {"model": "tiny", "prompt": "a <image> b", "images": [encoded(PNG)]}
    request = parse_completion(json.dumps(body).encode(), LIMITS, choose_dialect=lambda model: FIREWORKS)
    assert request.prompts[0].written == "a <image> b"
