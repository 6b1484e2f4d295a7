"""Which form a chat template asks for."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from serve_app.core.tools import ToolParserName
from serve_app.tools import forms
from serve_app.tools.forms import FORMS, HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, QWEN3_CODER, UNKNOWN, Form, form_for

QWEN = """{%- if tools %}...return a json object with function name and arguments within <tool_call></tool_call> tags:
<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>{% endif %}"""
LLAMA_31 = """{{- "<|start_header_id|>user<|end_header_id|>" }}{{- 'Respond in the format {"name": function name,
"parameters": dictionary of argument name and its value}.' }}{{- "<|python_tag|>" + tool_call.name }}"""
LLAMA_32 = """<|start_header_id|>{{- 'Respond in the format {"name": function name, "parameters": dictionary' }}"""
MISTRAL_V3 = """{{- "[AVAILABLE_TOOLS] [" }}{{- "[TOOL_CALLS] [" }}{%- for tool_call in message.tool_calls %}"""
MISTRAL_V13 = """{{- "[TOOL_CALLS]" + tool.function.name + "[ARGS]" + arguments }}"""
QWEN_CODER = """<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>"""
GLM_45 = (
    """<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>"""
)
GLM_47 = """<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"""
CHATML = "{% for message in messages %}<|im_start|>{{ message.role }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (QWEN, HERMES),
        (LLAMA_31, LLAMA3),
        (LLAMA_32, LLAMA3),
        (MISTRAL_V3, MISTRAL),
        (MISTRAL_V13, MISTRAL_NAMED),
        (QWEN_CODER, QWEN3_CODER),
        (GLM_45, forms.GLM45),
        (GLM_47, forms.GLM47),
        ("<tool_call>function<tool_sep>", forms.HUNYUAN),
        ("<seed:tool_call>\n<function=name>\n<parameter=key>", forms.SEED_OSS),
        ("in <tool_calls>[{...}]</tool_calls>, never <tool_call>", forms.HUNYUAN),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool.type + '\\n```json\\n'", forms.DEEPSEEK_V3),
        ("'<｜tool▁calls▁begin｜>' + name + '<｜tool▁sep｜>'", forms.DEEPSEEK_V31),
        ("{%- set token = '｜DSML｜' -%}", forms.DEEPSEEK_V32),
        ("<|start|>assistant<|channel|>commentary to=functions.", forms.HARMONY),
        ("<|tool_call|> followed by a JSON list", forms.GRANITE),
        ("<|tool|>{{ tools }}<|/tool|>", forms.PHI4_MINI),
        ("<|START_ACTION|>[{...}]<|END_ACTION|> and 'Action:'", forms.COHERE),
        ("'<|tool_call>call:' + name", forms.GEMMA4),
        ("<|tool_list_start|>[", forms.LFM2),
        ("<|python_start|>", forms.LLAMA4),
        (CHATML, UNKNOWN),
        ("", UNKNOWN),
    ],
)
def test_a_template_shows_the_form_of_its_family(template: str, form: Form) -> None:
    assert form_for(template) is form


REAL = Path(__file__).parents[3] / "shared/real-folders"
FOLDERS = {
    "command-a": "cohere", "deepseek-r1": "deepseek_v3", "deepseek-v3.2": "deepseek_v32", "falcon-h1": "hermes",
    "devstral-small-2": "mistral_named", "gemma-4": "gemma4", "glm-4-9b-chat-hf": "glm4", "glm-4.5": "glm45",
    "glm-4.7-flash": "glm47", "gpt-oss-20b": "harmony", "granite-3.2-2b": "granite", "kimi-k2": "kimi_k2",
    "llama-3.1-8b-instruct": "llama3", "llama-4-scout": "llama4", "mistral-nemo": "mistral", "phi-4-mini": "phi4_mini",
    "lfm2": "lfm2", "qwen3": "hermes", "qwen3.5": "qwen3_coder", "seed-oss": "seed_oss", "tinyllama-chat": "json",
}  # fmt: skip


@pytest.mark.skipif(not REAL.exists(), reason="the folders are not here")
@pytest.mark.parametrize("folder", FOLDERS)
def test_templates_of_real_models_show_their_forms(folder: str) -> None:
    files = (REAL / folder / name for name in ("chat_template.jinja", "tokenizer_config.json"))
    templates = [file.read_text(encoding="utf-8") for file in files if file.exists()]
    assert form_for(templates[0]).name == FOLDERS[folder]


@pytest.mark.parametrize(
    ("name", "form"),
    [("hermes", HERMES), ("qwen", HERMES), ("llama3_json", LLAMA3), ("mistral", MISTRAL), ("json", forms.JSON)],
)
def test_a_form_that_was_named_is_taken_whatever_the_template_says(name: ToolParserName, form: Form) -> None:
    assert form_for(QWEN, name) is form
    assert form_for(MISTRAL_V3, name) is form


def test_every_name_that_an_operator_may_give_has_a_form() -> None:
    assert set(get_args(ToolParserName)) == set(FORMS)
