"""Where a model's chat template is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve_app.catalog.chat_template import MAX_BYTES, read_chat_template


def test_the_embedded_model_has_one() -> None:
    assert "message" in read_chat_template(Path("serve_app/demo/model"))


def test_a_file_of_its_own_comes_before_the_tokenizers_configuration(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path) == ""
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "{{ old }}"}))
    assert read_chat_template(tmp_path) == "{{ old }}"
    (tmp_path / "chat_template.jinja").write_text("{{ new }}")
    assert read_chat_template(tmp_path) == "{{ new }}"


@pytest.mark.parametrize(
    ("config", "template"),
    [
        ({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}, "d"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}, 5]}, ""),
        ({"chat_template": 5}, ""),
        ({}, ""),
        ([], ""),
    ],
)
def test_of_several_templates_the_default_is_shown(tmp_path: Path, config: object, template: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_chat_template(tmp_path) == template


def test_what_cannot_be_read_is_no_template(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert read_chat_template(tmp_path) == ""
    (tmp_path / "chat_template.jinja").write_text("x" * (MAX_BYTES + 1))
    assert read_chat_template(tmp_path) == ""
