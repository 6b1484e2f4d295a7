"""`batch run` by a service: what is sent, what is written, and how a run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from serve_app.cli.screen import Exit
from serve_app.offline.run import Journal
from tests.cli.served import CommandLine, Served


def write_lines(file: Path, lines: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def line(number: int, **body: object) -> dict[str, Any]:
    whole = {"model": "demo", "prompt": f"Once {number}", "max_tokens": 2, **body}
    return {"custom_id": f"own-{number}", "method": "POST", "url": "/v1/completions", "body": whole}


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_lines_are_answered_in_their_order(run: CommandLine, served: Served, tmp_path: Path) -> None:
    file, before = (
        write_lines(tmp_path / "in.jsonl", [line(number) for number in range(20)]),
        len(served.recorded.bodies),
    )
    ran = run("batch", "run", file, "--concurrency", "4", "--json")
    assert (ran.code, ran.json["answered"], ran.json["failed"]) == (Exit.DONE, 20, 0)
    found = read_lines(tmp_path / "in.answers.jsonl")
    assert [each["custom_id"] for each in found] == [f"own-{number}" for number in range(20)]
    assert {each["response"]["status_code"] for each in found} == {200}
    assert {each["response"]["body"]["model"] for each in found} == {"demo"}
    assert len(served.recorded.bodies) == before + 20
    sent = {headers.get(b"x-request-id", b"").decode() for headers in served.recorded.headers}
    assert {each["response"]["request_id"] for each in found} <= sent
    assert {each.name for each in tmp_path.iterdir()} == {"in.jsonl", "in.answers.jsonl"}


def test_a_refused_line_fails_the_run_and_alone_is_asked_again(
    run: CommandLine, served: Served, tmp_path: Path
) -> None:
    lines = [line(1), line(2, max_tokens=-7), line(3)]
    ran = run("batch", "run", write_lines(tmp_path / "in.jsonl", lines))
    assert ran.code == Exit.FAILED
    assert "2 of 3 requests were answered" in ran.out
    assert '1 × "max_tokens" must be' in ran.err
    assert [each["response"]["status_code"] for each in read_lines(tmp_path / "in.answers.jsonl")] == [200, 400, 200]
    before = len(served.recorded.bodies)
    file = write_lines(tmp_path / "in.jsonl", [line(1), line(2), line(3)])
    assert run("batch", "run", file).code == Exit.DONE
    assert [body["prompt"] for body in served.recorded.bodies[before:]] == ["Once 2"]
    assert [each["response"]["status_code"] for each in read_lines(tmp_path / "in.answers.jsonl")] == [200, 200, 200]
    assert {each.name for each in tmp_path.iterdir()} == {"in.jsonl", "in.answers.jsonl"}


def test_a_result_is_not_written_over(run: CommandLine, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "in.jsonl", [line(1)])
    (tmp_path / "in.answers.jsonl").write_text("kept")
    ran = run("batch", "run", file)
    assert ran.code == Exit.MISUSED
    assert "is there already" in ran.err
    assert (tmp_path / "in.answers.jsonl").read_text() == "kept"


def test_rows_of_parquet_are_answered_beside_themselves(run: CommandLine, served: Served, tmp_path: Path) -> None:
    rows = [{"prompt": f"row {number}", "max_tokens": number, "source": "book"} for number in (1, 2, 3)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    ran = run("batch", "run", str(tmp_path / "in.parquet"), "-m", "demo:pirate", "--temperature", "0")
    assert ran.code == Exit.DONE
    assert "columns that are no parameters are not sent: source" in ran.err
    assert served.asked.keys() == {"model", "temperature", "prompt", "max_tokens"}
    assert served.asked["model"] == "demo:pirate"
    table = pyarrow.parquet.read_table(tmp_path / "in.answers.parquet").to_pylist()
    assert [(each["prompt"], each["source"]) for each in table] == [(each["prompt"], "book") for each in rows]
    assert [len(each["text"].split()) for each in table] == [1, 2, 3]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--url", "http://127.0.0.1:1"], Exit.UNREACHABLE, "No service answers"),
        (["--local", "no-such-folder"], Exit.FAILED, "'no-such-folder' is not a folder"),
        (["-o", "out.parquet", "--temprature", "0"], Exit.MISUSED, "--temperature"),
    ],
)
def test_what_keeps_a_run_from_beginning_is_told(
    run: CommandLine, tmp_path: Path, words: list[str], code: Exit, told: str
) -> None:
    ran = run("batch", "run", write_lines(tmp_path / "in.jsonl", [line(1)]), *words)
    assert (ran.code, told in ran.err) == (code, True), ran.err


def test_a_file_that_another_run_answers_is_left_to_it(run: CommandLine, served: Served, tmp_path: Path) -> None:
    file, before = write_lines(tmp_path / "in.jsonl", [line(1)]), len(served.recorded.bodies)
    journal = Journal(tmp_path / "in.answers.jsonl.part")
    ran = run("batch", "run", file)
    journal.close(is_done=True)
    assert ran.code == Exit.FAILED
    assert "another run has it" in ran.err
    assert len(served.recorded.bodies) == before
