"""Lines and rows become requests, and answers become lines and columns."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from serve_app.core.batches import Answered
from serve_app.core.errors import InvalidRequest
from serve_app.offline.files import COLUMNS, Form, questions, schema_of, write_answers

FORM = Form(default="demo", parameters={"max_tokens": 3})


def test_a_line_of_openai_and_a_row_are_requests_and_say_more_than_the_command() -> None:
    line = {"custom_id": "own", "method": "POST", "url": "/v1/embeddings", "body": {"model": "other", "input": "a"}}
    found = FORM.question(1, line)
    assert (found.path, found.custom_id) == ("/v1/embeddings", "own")
    assert found.body == {"model": "other", "input": "a"}, "max_tokens is nothing to an embedding"
    row = {"prompt": "a", "max_tokens": 5, "seed": None, "source": "book"}
    found = FORM.question(2, row)
    assert (found.path, found.custom_id, found.unsent) == ("/v1/completions", "2", ["source"])
    assert found.body == {"model": "demo", "max_tokens": 5, "prompt": "a"}
    assert Form(default="demo", model="demo:pirate").question(1, line).body["model"] == "demo:pirate"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1]", 'line 2" must be an object with a prompt'),
        ('{"text": "a"}', 'line 2" must be an object with a prompt'),
        ('{"url": "/v1/models", "body": {}}', "line 2: url"),
        ('{"url": "/v1/completions", "body": 7}', "line 2: body"),
        ('{"url": "/v1/completions", "body": {"stream": true}}', "without stream"),
        ('{"prompt": ', "line 2 of .* is no JSON"),
        ('{"prompt": "a", "temperature": NaN}', "line 2: body.*values that JSON has"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{text}\n')
    with pytest.raises(InvalidRequest, match=told):
        list(questions(file, FORM))


def test_empty_lines_are_none_and_numbers_are_those_of_an_editor(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": "b"}')
    assert [(each.number, each.body["prompt"]) for each in questions(file, FORM)] == [(1, "a"), (3, "b")]


ANSWERS = [
    (200, {"choices": [{"text": "told", "finish_reason": "stop"}]}),
    (200, {"choices": [{"message": {"content": "said"}, "finish_reason": "length"}]}),
    (200, {"data": [{"embedding": [0.5]}]}),
    (400, {"error": {"message": "wrong"}}),
]


def test_answers_in_parquet_stand_beside_the_columns_of_their_rows(tmp_path: Path) -> None:
    source, target = tmp_path / "in.parquet", tmp_path / "out.parquet"
    rows = [{"prompt": "a", "source": number} for number in range(len(ANSWERS))]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    lines = [Answered(status=status, body=json.dumps(body).encode()).line("id", "own") for status, body in ANSWERS]
    asked = list(questions(source, FORM))
    assert [each.row["source"] for each in asked] == [0, 1, 2, 3]
    write_answers(zip(asked, lines, strict=True), target, schema_of(source))
    table = pyarrow.parquet.read_table(target)
    assert table.column_names == ["prompt", "source", *COLUMNS]
    assert table.column("source").to_pylist() == [0, 1, 2, 3]
    assert table.column("status").to_pylist() == [200, 200, 200, 400]
    assert table.column("text").to_pylist() == ["told", "said", None, None]
    assert table.column("error").to_pylist() == [None, None, None, "wrong"]
    assert [json.loads(each) for each in table.column("response").to_pylist()] == [body for _, body in ANSWERS]


@pytest.mark.parametrize(("own", "ids"), [([0, 1], ["0", "1"]), ([None, 0], ["1", "0"]), (["", "b"], ["1", "b"])])
def test_ids_are_texts_and_each_row_keeps_its_own(tmp_path: Path, own: list[object], ids: list[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_text("".join(json.dumps({"custom_id": each, "prompt": "a"}) + "\n" for each in own))
    asked = list(questions(source, FORM))
    assert [each.custom_id for each in asked] == ids
    line = Answered(status=200, body=b"{}").line("id", "own")
    write_answers([(each, line) for each in asked], target, schema_of(source))
    assert pyarrow.parquet.read_table(target).column("custom_id").to_pylist() == ids


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    file = tmp_path / "in.parquet"
    file.write_text("{}")
    with pytest.raises(InvalidRequest, match=r"in\.parquet cannot be read as Parquet"):
        list(questions(file, FORM))


def test_a_column_of_the_results_own_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "text": "b", "status": 1}]), file)
    with pytest.raises(InvalidRequest, match="rename status, text"):
        schema_of(file)


def test_without_pyarrow_it_is_said_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidRequest, match=r"pip install .*\[parquet\]"):
        schema_of(tmp_path / "in.jsonl")
