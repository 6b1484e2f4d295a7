"""Traces of three kinds, read as what they say; what is none is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve_app.core.prefixes import prefixes_of
from serve_app.whatif.trace import Asked, Unusable, read_trace


def written(folder: Path, *records: object, name: str = "trace.jsonl") -> str:
    file = folder / name
    file.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in records))
    return str(file)


def ids(asked: Asked) -> tuple[int, ...]:
    [part] = asked.request("tiny", 0).prompt.parts
    assert isinstance(part, tuple)
    return part


def test_hashes_of_mooncake_are_blocks_that_requests_share(tmp_path: Path) -> None:
    first = {"timestamp": 3000, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]}
    second = {"timestamp": 1000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 9]}
    later, earlier = read_trace(written(tmp_path, first, second))[::-1]
    assert (earlier.at_s, later.at_s, earlier.output_tokens) == (0.0, 2.0, 7)
    assert len(ids(earlier)) == earlier.input_tokens == 1100
    assert ids(earlier)[:1024] == ids(later)[:1024]
    assert ids(earlier)[1024:] != ids(later)[1024:1100]
    names = [prefixes_of(each.request("tiny", 0)).names for each in (earlier, later)]
    assert names[0][:10] == names[1][:10]


def test_tokens_without_a_hash_are_nobody_elses(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 64, "output_length": 1}
    first, second = read_trace(written(tmp_path, line, line))
    assert ids(first) != ids(second)


def test_a_tenant_finds_nothing_of_another_one(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [4]}
    ours, theirs = read_trace(written(tmp_path, line | {"tenant": "a"}, line | {"tenant": "b"}))
    assert prefixes_of(ours.request("tiny", 0)).names != prefixes_of(theirs.request("tiny", 0)).names


def test_the_routers_log_is_a_trace_with_what_was_measured(tmp_path: Path) -> None:
    line = {
        "time": "2026-11-26T20:00:10.500Z", "event": "completion", "request_id": "r", "status": 200,
        "duration_s": 2.5, "first_sent_s": 0.25, "model": "tiny:sql", "prompt_tokens": 100, "cached_tokens": 64,
        "completion_tokens": 9, "tenant": "acme",
    }  # fmt: skip
    before = line | {"time": "2026-11-26T20:00:05.000Z", "duration_s": 1.0}
    refused = line | {"status": 503}
    first, second = read_trace(written(tmp_path, "(Router pid=7) " + json.dumps(line), before, refused, "no JSON"))
    assert (first.at_s, second.at_s) == (0.0, 4.0)
    assert (second.base, second.adapter, second.tenant) == ("tiny", "sql", "acme")
    assert (second.first_s, second.total_s, second.input_tokens) == (0.25, 2.5, 100)
    assert ids(first)[:64] == ids(second)[:64]
    assert ids(first)[64:] != ids(second)[64:]


def test_azures_tables_are_traces(tmp_path: Path) -> None:
    rows = (
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    )
    first, second = read_trace(written(tmp_path, *rows, name="azure.csv"))
    assert (first.input_tokens, second.output_tokens) == (374, 109)
    assert second.at_s == pytest.approx(4.314579)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"timestamp": 0, "input_length": -1, "output_length": 1}', "line 1: a number of tokens must be from 0"),
        ('{"timestamp": 0, "input_length": 1e30, "output_length": 1}', "line 1: a number of tokens must be from 0"),
        ('{"timestamp": 0, "input_length": 5}', "line 1: 'output_length'"),
        ('{"timestamp": "noon", "input_length": 5, "output_length": 5}', "line 1: could not convert"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 5}', "line 1: a time must be"),
        ("nothing", "has no request in it"),
        ("{", "line 1"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, line: str, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        read_trace(written(tmp_path, line))


def test_what_else_a_log_says_is_passed_over(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 5, "output_length": 5}
    assert len(read_trace(written(tmp_path, line, "(Router pid=7) KeyError: {1, 2}", line))) == 2


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(Unusable, match=r"missing\.jsonl cannot be read"):
        read_trace("missing.jsonl")
