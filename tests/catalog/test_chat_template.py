"""Where a model's chat templates are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from serve_app.catalog.defaults import MAX_TEMPLATE_BYTES, ChatTemplates, chat_templates_of, read_chat_templates
from serve_app.catalog.files import CatalogError

DEMO = Path("serve_app/demo/model")
BOTH = {"default": "d", "tool_use": "t"}


def test_the_embedded_model_has_one() -> None:
    assert "message" in read_chat_templates(DEMO).default


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_json", ".json").replace("_jinja", ".jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, ("", "")),
        ({"tokenizer_config_json": {"chat_template": None}}, ("", "")),
        ({"tokenizer_config_json": {"chat_template": "c"}}, ("c", "")),
        ({"tokenizer_config_json": {"chat_template": [{"name": name, "template": BOTH[name]} for name in BOTH]}},
         ("d", "t")),
        ({"tokenizer_config_json": {"chat_template": [{"name": "rag", "template": "r"}]}}, ("", "")),
        ({"tokenizer_config_json": {"chat_template": BOTH}}, ("d", "t")),
        ({"tokenizer_config_json": {"chat_template": "c"}, "chat_template_jinja": "j"}, ("j", "")),
        ({"chat_template_jinja": "j", "additional_chat_templates__tool_use_jinja": "t"}, ("j", "t")),
        ({"tokenizer_config_json": {"chat_template": "c"}, "additional_chat_templates__tool_use_jinja": "t"},
         ("", "t")),
        ({"tokenizer_config_json": {"chat_template": "c"}, "chat_template_json": {"chat_template": "p"}}, ("p", "")),
        ({"chat_template_json": {"chat_template": BOTH}}, ("d", "t")),
        ({"chat_template_json": {"chat_template": [{"name": "default", "template": "d"}]}}, ("d", "")),
        ({"chat_template_json": {"chat_template": "p"}, "chat_template_jinja": "j"}, ("p", "")),
        ({"processor_config_json": {"chat_template": "q"}, "chat_template_json": {"chat_template": "p"}}, ("q", "")),
        ({"processor_config_json": {"x": 1}, "chat_template_jinja": "j"}, ("j", "")),
        ({"tokenizer_config_json": {"chat_template": "c", "unused": "x" * (2 << 20)}}, ("c", "")),
    ],
)  # fmt: skip
def test_templates_are_found_where_processors_and_tokenizers_find_them(
    tmp_path: Path, files: dict[str, object], found: tuple[str, str]
) -> None:
    templates = read_chat_templates(write(tmp_path, **files))
    assert (templates.default, templates.tool_use) == found
    assert bool(templates) is any(found)


@pytest.mark.parametrize("as_files", [False, True])
def test_what_transformers_saves_is_what_it_takes_for_tools(tmp_path: Path, *, as_files: bool) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json"))
    tokenizer.chat_template = BOTH
    tokenizer.save_pretrained(tmp_path, save_jinja_files=as_files)
    loaded, ours = AutoTokenizer.from_pretrained(tmp_path), read_chat_templates(tmp_path)
    assert ours.tool_use == loaded.get_chat_template(tools=[{}]) == "t"
    assert ours.default == loaded.get_chat_template() == "d"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer_config_json": {"chat_template": 5}}, 'must be a text, a list of objects with "name"'),
        ({"tokenizer_config_json": {"chat_template": ["t"]}}, "must be a text, a list"),
        ({"chat_template_json": {"chat_template": [{"name": "default"}]}}, "must be a text, a list"),
        ({"chat_template_json": {"chat_template": [{"name": ["default"], "template": "t"}]}}, "must be a text, a list"),
        ({"chat_template_json": "{"}, "is not JSON"),
        ({"tokenizer_config_json": "["}, "is not JSON"),
        ({"chat_template_jinja": "x" * (MAX_TEMPLATE_BYTES + 1)}, "at most 1048576 are read"),
        (
            {"tokenizer_config_json": {"chat_template": "x" * (MAX_TEMPLATE_BYTES + 1)}},
            "default in .* has more than 1048576",
        ),
    ],
)
def test_what_cannot_be_read_is_an_error(tmp_path: Path, files: dict[str, object], words: str) -> None:
    with pytest.raises(CatalogError, match=words):
        read_chat_templates(write(tmp_path, **files))


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CatalogError, match="cannot be read: 'utf-8' codec"):
        read_chat_templates(tmp_path)


def test_a_template_that_is_given_takes_the_place_of_the_folders(tmp_path: Path) -> None:
    write(tmp_path, chat_template_jinja="j", own_jinja="o")
    assert chat_templates_of(tmp_path, "{{ x }}") == ChatTemplates(default="{{ x }}")
    assert chat_templates_of(tmp_path, str(tmp_path / "own.jinja")) == ChatTemplates(default="o")
    assert not chat_templates_of(tmp_path, "")
    with pytest.raises(CatalogError, match="is no file of a chat template, and no template"):
        chat_templates_of(tmp_path, str(tmp_path / "none.jinja"))
