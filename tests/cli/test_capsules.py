"""`serve_app capture` and `replay`: a completion comes again, or the first difference is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.cli.capsules import differences, other_conditions
from serve_app.cli.screen import Exit
from tests.cli.served import CommandLine, Served

CAPSULE: dict[str, Any] = {
    "object": "capsule", "id": "cmpl-1", "created": 0, "service_version": "1", "path": "/v1/completions",
    "dialect": "union", "request": {},
    "parts": [
        {
            "part": 0, "model": "demo", "engine": "own", "numerics": "float32", "prompt_tokens": 1,
            "sampling": {"temperature": 0.0}, "stop": {"max_tokens": 3},
            "choices": [{"token_ids": [1, 2, 3], "text": "abc", "finish_reason": "length", "matched_stop": None}],
        }
    ],
}  # fmt: skip


def capture(run: CommandLine, served: Served, file: Path, *more: str) -> None:
    """Have a stream computed, and write its capsule."""
    run("complete", "Once", "-m", "demo:pirate", "--max-tokens", "5", "--stream", "--n", "1", *more)
    kept = served.backend.submissions[-1][0].kept
    assert kept is not None
    ran = run("capture", kept.id, str(file))
    assert (ran.code, ran.out) == (Exit.DONE, f"{file} has 1 completions with 5 tokens of {kept.id}.\n")


def test_a_captured_completion_comes_again(run: CommandLine, served: Served, tmp_path: Path) -> None:
    file = tmp_path / "capsule.json"
    capture(run, served, file, "--dialect", "vllm")
    assert file.stat().st_mode & 0o077 == 0, "it has texts"
    ran = run("replay", str(file))
    assert (ran.code, ran.out, ran.err) == (Exit.DONE, "The same: 1 completions with 5 tokens.\n", "")
    assert served.asked["model"] == "demo:pirate@v1"
    assert served.recorded.headers[-2][b"x-completions-dialect"] == b"vllm"
    assert run("replay", str(file), "--json").json["is_same"] is True
    asked = {"model": "demo", "input": "Once", "max_output_tokens": 5}
    answer = httpx.post(f"{served.url}/v1/responses", json=asked, headers={"x-capsule": "true"}, timeout=60)
    assert run("capture", answer.json()["id"], str(tmp_path / "response.json")).code == Exit.DONE
    assert run("replay", str(tmp_path / "response.json")).out == "The same: 1 completions with 5 tokens.\n"


def test_the_first_token_that_differs_is_told(
    run: CommandLine, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "capsule.json"
    capture(run, served, file)
    script = served.backend.script
    monkeypatch.setattr(served.backend, "script", lambda request, sample: script(request, sample)[:3])
    ran = run("replay", str(file))
    assert ran.code == Exit.FAILED
    assert ran.out.startswith("part 0, choice 0: token 3 was ")
    assert ran.out.endswith("; 5 tokens then, 4 now\n")
    told = run("replay", str(file), "--json")
    assert (told.code, told.json["is_same"], len(told.json["differences"])) == (Exit.FAILED, False, 1)


def test_what_is_no_capsule_or_no_new_file_is_told(run: CommandLine, served: Served, tmp_path: Path) -> None:
    file = tmp_path / "capsule.json"
    capture(run, served, file)
    kept = served.backend.submissions[-1][0].kept
    assert kept is not None
    again = run("capture", kept.id, str(file))
    assert (again.code, again.out) == (Exit.FAILED, "")
    assert "Name another file" in again.err
    assert run("capture", "cmpl-none", str(file)).code == Exit.REFUSED
    for content, said in (("{}", "is no capsule"), ("{", "cannot be read"), ("[]", "is no capsule")):
        file.write_text(content)
        ran = run("replay", str(file))
        assert (ran.code, said in ran.err) == (Exit.FAILED, True), ran


@pytest.mark.parametrize("path", ["/admin/keys", ".example.org/x", ":80/v1/completions", None])
def test_a_key_goes_to_no_other_place(run: CommandLine, served: Served, tmp_path: Path, path: object) -> None:
    file, num_sent = tmp_path / "capsule.json", len(served.backend.submissions)
    file.write_text(json.dumps(CAPSULE | {"path": path, "dialect": "union", "request": {}, "object": "capsule"}))
    ran = run("replay", str(file))
    assert (ran.code, "must hold a request of /v1/completions" in ran.err) == (Exit.FAILED, True), ran
    assert len(served.backend.submissions) == num_sent


def changed(**changes: Any) -> dict[str, Any]:
    """Return the capsule with other members: of the whole, of its part, or of its choice."""
    made: dict[str, Any] = json.loads(json.dumps(CAPSULE))
    [part] = made["parts"]
    for name, value in changes.items():
        next(each for each in (made, part, part["choices"][0]) if name in each)[name] = value
    return made


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"service_version": "2"}, "service_version was '1' and is '2'"),
        ({"engine": "vllm"}, "part 0: engine was 'own' and is 'vllm'"),
        ({"numerics": "bfloat16"}, "part 0: numerics was 'float32' and is 'bfloat16'"),
        ({"model": "demo:pirate@v2"}, "part 0: model was 'demo' and is 'demo:pirate@v2'"),
        ({"sampling": {"temperature": 1.0}}, "part 0: temperature was 0.0 and is 1.0"),
        ({"stop": {"max_tokens": None}}, "part 0: max_tokens was 3 and is None"),
    ],
)
def test_other_conditions_are_told(changes: dict[str, Any], told: str) -> None:
    assert list(other_conditions(CAPSULE, changed(**changes))) == [told]
    assert list(differences(CAPSULE, changed(**changes))) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"token_ids": [1, 5, 3]}, ["part 0, choice 0: token 1 was 2 and is 5; 3 tokens then, 3 now"]),
        ({"token_ids": [1, 2]}, ["part 0, choice 0: token 2 was 3 and is not there; 3 tokens then, 2 now"]),
        ({"token_ids": [1, 2, 3, 4]}, ["part 0, choice 0: token 3 was not there and is 4; 3 tokens then, 4 now"]),
        ({"finish_reason": "stop"}, ["part 0, choice 0: finish_reason was 'length' and is 'stop'"]),
        ({"text": "ab"}, ["part 0, choice 0: the tokens are the same, and the text differs from character 2 on"]),
    ],
)
def test_every_difference_is_told_once(changes: dict[str, Any], told: list[str]) -> None:
    assert list(differences(CAPSULE, changed(**changes))) == told


def test_what_is_missing_in_the_answer_is_told() -> None:
    fewer = changed()
    fewer["parts"][0]["choices"] = []
    assert list(differences(CAPSULE, fewer)) == ["part 0: had 1 choices and has 0"]
    assert list(differences(CAPSULE, {**CAPSULE, "parts": []})) == ["part 0: is not in the answer"]


def test_a_completion_that_had_not_ended_is_compared_as_far_as_it_came() -> None:
    begun = changed(token_ids=[1, 2], finish_reason=None, text="ab")
    assert list(differences(begun, CAPSULE)) == []
    assert len(list(differences(changed(token_ids=[1, 9], finish_reason=None), CAPSULE))) == 1
