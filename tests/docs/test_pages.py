"""What the documents say in tables is what the code says: once, and the same everywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from serve_app.api.dialects import DIALECTS, UNION
from serve_app.api.limits import DEFAULT_LIMITS
from serve_app.api.openapi import openapi_document
from serve_app.api.parameters import OTHER_NAMES as RENAMED
from serve_app.cli.tenancy_commands import tenant_offers
from serve_app.core.errors import InvalidRequest
from serve_app.core.request import Constraint
from serve_app.deployments.arguments import CanarySettings, LimitSettings, ModelArgs, RouterSettings, TracingSettings
from serve_app.http.middleware import READABLE
from tests.docs.command_line import command_tree
from tests.docs.contract import bodies, ignored, names_of
from tests.docs.docstrings import told_of, told_of_settings
from tests.docs.laws import held_by, stated
from tests.docs.markdown import filled, sections_of, table
from tests.docs.sections import PAGES, REPOSITORY, SECTIONS
from tests.parsing import parse_completion

CONTRACT = REPOSITORY / "docs" / "contract.md"
LEADING_CODE = re.compile(r"^\| (?P<cell>`[^|]*?) \|", re.MULTILINE)


@pytest.fixture(scope="module")
def document() -> Mapping[str, Any]:
    return openapi_document(DEFAULT_LIMITS, UNION)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_sections_are_what_the_code_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == filled(text, SECTIONS), "write them again: python -m tests.docs.write"


def test_the_index_leads_to_every_page() -> None:
    folder = REPOSITORY / "docs"
    index = (folder / "README.md").read_text(encoding="utf-8")
    pages = {str(file.relative_to(folder)) for file in folder.rglob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\(([\w/-]+\.md)\)", index)) == pages


def test_every_option_of_a_tenant_is_on_the_page_of_commands() -> None:
    (row,) = [line for line in command_tree().splitlines() if "`serve_app tenants add NAME`" in line]
    assert {offer.flag for offer in tenant_offers()} <= set(re.findall(r"`(--[\w-]+)`", row))


def test_every_section_is_on_one_page() -> None:
    placed = [name for page in PAGES for name in sections_of(page.read_text(encoding="utf-8"))]
    assert sorted(placed) == sorted(SECTIONS)


def rows_of(section: str) -> Iterator[list[str]]:
    """Cells of a generated table of the contract, without its head."""
    text = CONTRACT.read_text(encoding="utf-8")
    body = text.partition(f"<!-- generated: {section} -->")[2].partition("<!-- end -->")[0]
    for line in body.strip().splitlines()[2:]:
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_parser_openapi_and_contract_know_the_same_names(document: Mapping[str, Any]) -> None:
    told = {name for row in rows_of("parameters") for name in re.findall(r"`(\w+)`", f"{row[0]} {row[1]}")}
    told |= {name for row in rows_of("refused") for name in re.findall(r"`(\w+)`", row[1])}
    told |= set(re.findall(r"`(\w+)`", ignored()))
    assert told == set(document["components"]["schemas"]["CompletionRequest"]["properties"])
    assert told == set(bodies()["union"]["parameters"])


@pytest.mark.parametrize("row", list(rows_of("parameters")), ids=lambda row: row[0].strip("`"))
def test_what_a_parameter_must_be_is_told_alike_by_contract_openapi_and_parser(
    row: list[str], document: Mapping[str, Any]
) -> None:
    name, allowed = row[0].strip("`"), row[2]
    described = document["components"]["schemas"]["CompletionRequest"]["properties"][name]["description"]
    assert allowed in described or described.startswith("Has no effect")
    if name == "prompt":
        return  # its message says which part of it is wrong; tests/api/test_prompts.py
    wrong = 5 if name in ("stream_options", "logit_bias", "json_schema") else {"\0": 0}
    body = {"model": "m", "prompt": "p", name: wrong}
    if name == "top_logprobs":
        body["logprobs"] = True
    with pytest.raises(InvalidRequest, match=re.escape(f'"{name}" must be {allowed}; found ')):
        parse_completion(json.dumps(body).encode())


@pytest.mark.parametrize("row", list(rows_of("parameters")), ids=lambda row: row[0].strip("`"))
def test_a_parameter_is_told_what_it_does(row: list[str]) -> None:
    assert len(row[4]) > 10


def test_defaults_of_the_contract_are_those_of_openapi(document: Mapping[str, Any]) -> None:
    properties = document["components"]["schemas"]["CompletionRequest"]["properties"]
    told = {row[0].strip("`"): row[3].strip("`") for row in rows_of("parameters")}
    for name, default in told.items():
        if default != "–":
            described = properties[name]["default"]
            if name == "stream_options":  # may be sent only with `stream`: null, which means the same, always may
                assert described is None
                continue
            assert default == (
                described if isinstance(described, str) else json.dumps(described, ensure_ascii=False)
            ), name


def parsed(dialect: str, **members: Any) -> dict[str, Any]:
    """What the parser makes of these beside a model and a prompt."""
    body = json.dumps({"model": "m", "prompt": "p", **members}).encode()
    request = parse_completion(body, choose_dialect=lambda model: DIALECTS[dialect])
    return {name: value for name, value in request if name not in ("max_tokens_name", "sends_max_tokens")}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_defaults_of_openapi_are_those_of_the_parser_and_the_listing(dialect: str) -> None:
    described = openapi_document(DEFAULT_LIMITS, DIALECTS[dialect])["components"]["schemas"]["CompletionRequest"]
    defaults = {name: each["default"] for name, each in described["properties"].items() if "default" in each}
    assert len(defaults) > 60
    for name, default in defaults.items():
        assert parsed(dialect, **{name: default}) == parsed(dialect), name
    listed = {name: value for name, value in bodies()[dialect]["defaults"].items() if defaults[name] is not None}
    assert {name: defaults[name] for name in listed} == listed


OTHER_NAMES = [(other, row[0].strip("`")) for row in rows_of("parameters") for other in re.findall(r"`(\w+)`", row[1])]
SMALL = {"boolean": True, "integer": 2, "number": 0.5, "object": {}, "string": "root ::= 'a'"}


def unnamed(values: dict[str, object]) -> dict[str, object]:
    """The same, where a constraint does not say what it was called."""
    return {name: replace(value, name="") if isinstance(value, Constraint) else value for name, value in values.items()}


@pytest.mark.parametrize(("other", "name"), OTHER_NAMES)
def test_another_name_is_told_alike_and_read_alike(other: str, name: str, document: Mapping[str, Any]) -> None:
    described = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert described[other]["description"].startswith(f"Another name of `{name}`.")
    does_more = bool(RENAMED[other].besides)
    assert described[other]["default"] == (None if does_more else described[name]["default"])
    value = SMALL[described[other]["anyOf"][0]["type"]]
    besides = {"mirostat": 1} if other == "mirostat_target" else {}
    ours, theirs = (parsed("union", **{each: value}, **besides) for each in (name, other))
    assert unnamed(theirs) == unnamed(ours)


def test_every_other_name_is_in_the_contract(document: Mapping[str, Any]) -> None:
    described = document["components"]["schemas"]["CompletionRequest"]["properties"]
    named = {name for name, each in described.items() if each["description"].startswith("Another name of ")}
    assert named == {other for other, _ in OTHER_NAMES} == set(RENAMED)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_has_its_column(dialect: str) -> None:
    text = CONTRACT.read_text(encoding="utf-8")
    heads = [line for line in text.splitlines() if line.startswith(("| parameter | union", "| meaning | union"))]
    assert len(heads) == 2
    assert all(f" {dialect} |" in head for head in heads)


def test_other_names_are_told_beside_their_parameter() -> None:
    assert {row[0].strip("`"): row[1] for row in rows_of("parameters")}[
        "max_tokens"
    ] == "`max_completion_tokens`, `n_predict`, `num_predict`"
    assert names_of("repetition_penalty") == ["repeat_penalty"]


def chapter(title: str) -> str:
    """A chapter of the contract, up to the next heading."""
    text = CONTRACT.read_text(encoding="utf-8")
    return re.split(r"^#+ ", text.partition(f" {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(text: str) -> set[str]:
    """What is in code in the first cells of tables."""
    return {name for found in LEADING_CODE.finditer(text) for name in re.findall(r"`([^`]+)`", found["cell"])}


def test_the_fields_of_responses_are_those_of_openapi(document: Mapping[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    choice = schemas["Choice"]["properties"]
    (logprobs,) = [each for each in choice["logprobs"]["anyOf"] if each.get("type") == "object"]
    described = [schemas["Completion"], schemas["Choice"], schemas["Usage"], logprobs]
    assert first_cells(chapter("Fields")) == {name for each in described for name in each["properties"]}


def test_the_fields_of_other_routes_are_those_of_openapi(document: Mapping[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert first_cells(chapter("Results of llama.cpp's own routes")) == set(schemas["NativeResult"]["properties"])
    described = [schemas[name] for name in ("Tokens", "Text", "TokenizerInfo", "Model")]
    described.append(schemas["Adapters"]["items"])
    told = chapter("Tokens, models, properties").partition("<!-- end -->")[2]
    assert first_cells(told) == {name for each in described for name in each["properties"]}


def test_the_routes_are_those_of_openapi(document: Mapping[str, Any]) -> None:
    assert first_cells(chapter("Routes")) == set(document["paths"])


def test_the_headers_are_those_that_pages_may_read() -> None:
    assert {name.lower() for name in first_cells(chapter("Headers"))} == {name.lower() for name in READABLE}


def test_the_statuses_of_errors_are_those_of_openapi(document: Mapping[str, Any]) -> None:
    told = {status for row in rows_of("errors") for status in re.findall(r"\b[45]\d\d\b", f"{row[0]} {row[3]}")}
    described = {
        status
        for path in document["paths"].values()
        for operation in path.values()
        for status in operation["responses"]
        if status[0] in "45"
    }
    assert told - {"401"} == described  # no key is asked for


PROMPT_FORMS = [
    (json.loads(form), meaning)
    for forms, meaning in re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", chapter("Prompts"), re.MULTILINE)
    for form in re.findall(r"`([^`]+)`", forms)
]


@pytest.mark.parametrize(("prompt", "meaning"), PROMPT_FORMS, ids=lambda each: json.dumps(each)[:40])
def test_a_prompt_is_as_many_as_the_contract_says(prompt: Any, meaning: str) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    if meaning == "400":
        with pytest.raises(InvalidRequest):
            parse_completion(body)
    else:
        count = len(prompt) if meaning == "one per element" else 1
        assert len(parse_completion(body).prompts) == count


CONTRADICTIONS = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| ([\w.]+) \|$", chapter("Contradictions"), re.MULTILINE)


@pytest.mark.parametrize(
    ("example", "dialect"), [each[1:] for each in CONTRADICTIONS], ids=[each[0] for each in CONTRADICTIONS]
)
def test_a_contradiction_of_the_contract_is_one(example: str, dialect: str) -> None:
    members = {"model": "m", "prompt": "a", **json.loads(example)}
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(json.dumps(members).encode(), choose_dialect=lambda model: DIALECTS[dialect])
    assert caught.value.param is not None
    assert caught.value.code == "invalid_value"


def test_examples_of_the_contract_are_found() -> None:
    assert len(PROMPT_FORMS) > 10
    assert len(CONTRADICTIONS) > 10


@pytest.mark.parametrize("settings", [ModelArgs, RouterSettings, LimitSettings, TracingSettings, CanarySettings])
def test_every_setting_is_described(settings: type[BaseModel]) -> None:
    described = {name for name, field in settings.model_fields.items() if field.description}
    assert set(settings.model_fields) - told_of_settings(settings).keys() - described - {"limits"} == set()


def test_what_a_docstring_says_of_fields_is_told_apart() -> None:
    class Box:
        """Holds things; a `width` is in metres.

        width, height: of its inside;  lid: what closes it:
            a board
        """

    assert told_of(Box, ("width", "height", "lid", "depth")) == {
        "width": "of its inside", "height": "of its inside", "lid": "what closes it: a board"
    }  # fmt: skip


def test_a_bar_in_a_cell_ends_no_cell() -> None:
    assert table(["a"], [["x | y"], ["x \\| y"]]).splitlines()[2:] == ["| x \\| y |", "| x \\| y |"]


def test_every_law_is_held_by_a_test_and_every_marker_names_a_law() -> None:
    held = {law for file in (REPOSITORY / "tests").rglob("test_*.py") for law, _ in held_by(file)}
    assert held == set(stated())
