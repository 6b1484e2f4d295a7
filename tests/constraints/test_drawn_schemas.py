"""Schemas that hypothesis-jsonschema has drawn: whatever is taken is followed, whatever is refused is told why."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from serve_app.constraints.limits import Refusal
from tests.constraints.drawn import FILE
from tests.constraints.test_json_schema import some_text
from tests.constraints.vocabularies import accepts

EVERY = 1 if os.environ.get("SCHEMA_CASES") else 10
TOLD = ("cannot be enforced", "nsatisfiable", "no text satisfies")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -3, 2.5, 0.1, 4096, "", "a", "ab-c", "on", "2024-02-29", "1.2.3.4", [], [1], ["a", None],
    [[], {}], {}, {"a": 1}, {"a": {}, "b": []},
)  # fmt: skip

pytestmark = pytest.mark.slow


def schemas() -> Iterator[dict[str, Any]]:
    yield from json.loads(FILE.read_text(encoding="utf-8"))[::EVERY]


def test_there_are_as_many_as_is_said() -> None:
    drawn = json.loads(FILE.read_text(encoding="utf-8"))
    assert len({json.dumps(schema, sort_keys=True) for schema in drawn}) >= 300


def test_what_is_written_under_a_schema_or_taken_by_it_satisfies_it() -> None:
    num_ended, num_taken, refused = 0, 0, Counter[str]()
    for schema in schemas():
        source, checked = json.dumps(schema), jsonschema.Draft202012Validator(schema)
        try:
            texts = [text for seed in range(2) if (text := some_text(schema, seed, max_tokens=200)) is not None]
        except Refusal as refusal:
            refused[refusal.message] += 1
            continue
        taken = [text for text in map(json.dumps, VALUES) if accepts("json_schema", source, text)]
        for text in (*texts, *taken):
            assert checked.is_valid(json.loads(text)), (text, source)
        num_ended, num_taken = num_ended + len(texts), num_taken + len(taken)
    print(f"{num_ended} texts, {num_taken} values taken; refused: {refused.most_common()}")
    assert all(any(words in reason for words in TOLD) for reason in refused)
    assert num_ended > 10
    assert num_taken > 10
