"""`serve_app whatif run` on the cluster file of the repository: what it says, and how it is told that it cannot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import main
from serve_app.cli.client import Service
from serve_app.cli.screen import Exit
from serve_app.cli.whatif import _told
from tests.whatif.traffic import COSTS

CLUSTER = str(Path(__file__).parents[2] / "cluster.yaml")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    COSTS.write(str(tmp_path / "steps.json"))
    lines = [
        {
            "timestamp": 40 * at, "input_length": 1100, "output_length": 8, "hash_ids": [at % 5, 100 + at % 5],
            "model": "other" if at == 3 else "demo", "first_s": 0.5, "total_s": 1.0,
        }
        for at in range(60)
    ]  # fmt: skip
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def asked(files: Path, *more: str) -> list[str]:
    trace, costs = str(files / "trace.jsonl"), str(files / "steps.json")
    return ["whatif", "run", trace, "--cluster", CLUSTER, "--steps", costs, *more]


def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_each_case_is_a_row_and_the_file_says_what_is_not_said(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(asked(files, "--json")) == Exit.DONE
    told = capsys.readouterr()
    assert [(each["policy"], each["num_replicas"], each["num_served"]) for each in json.loads(told.out)] == [
        ("warm", 2, 59)
    ]
    assert "1 requests to other models are left out" in told.err
    assert main(asked(files, "--replicas", "1,3", "--policy", "warm,random", "--json")) == Exit.DONE
    cases = [(each["policy"], each["num_replicas"]) for each in answer(capsys)]
    assert cases == [("warm", 1), ("warm", 3), ("random", 1), ("random", 3)]


def test_more_traffic_needs_more_replicas(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for speed in ("0.05", "20"):
        assert main(asked(files, "--find-replicas", "2", "--speed", speed, "--json")) == Exit.DONE
        [each] = answer(capsys)
        found.append(each["num_replicas"])
    assert found[0] == 1
    assert found[0] < found[1]


def test_a_back_test_that_is_far_off_fails(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(asked(files, "--back-test")) == Exit.FAILED
    assert "simulated beside recorded: tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--policy", "best"), "--policy must name warm, least_work, power_of_two, random; found 'best'"),
        (("--replicas", "0"), "--replicas must be numbers above 0, as 1,2,4; found '0'"),
        (("--model", "big"), "has no model 'big'; it has demo"),
        (("--find-replicas", "0.0001"), "no number of replicas keeps a p99 of 0.0001 s"),
    ],
)
def test_what_cannot_be_simulated_is_said(
    files: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    assert main(asked(files, *more)) == Exit.MISUSED
    assert message in capsys.readouterr().err


class Told(Service):
    """A service whose replica keeps prefixes."""

    def text(self, path: str, body: Mapping[str, object] | None = None, *, word: str) -> str:
        lines = [
            "replica_blocks{A} 10",
            *(f'replica_kv_bytes{{A,state="{state}"}} {size}' for state, size in SIZES.items()),
        ]
        of_it = 'model="demo",replica="r0"'
        return "".join(f"serve_app_{line.replace('A', of_it)}\n" for line in lines)


SIZES = {"budget": 1000, "used": 300, "cached": 600}


def test_the_size_of_a_block_is_its_part_of_the_budget() -> None:
    assert _told(Told(url="http://127.0.0.1:1"), "demo") == {"num_blocks": 10, "block_bytes": 100}
