"""Commands that ask a service: what they send, what they show, and what they end with."""

from __future__ import annotations

import io
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from serve_app.cli import screen
from serve_app.cli.complete import show_explanation
from serve_app.cli.listing import Dtype
from serve_app.cli.screen import Exit
from serve_app.core.errors import Unauthenticated
from serve_app.core.tenants import LOCAL, Identity
from serve_app.deployments.arguments import ModelArgs
from serve_app.http.guard import Door
from tests.cli.served import CommandLine, Served, serving

DEAD = "http://127.0.0.1:1"


def test_options_are_sent_as_what_they_are(run: CommandLine, served: Served) -> None:
    ran = run(
        "complete", "Once", "-m", "demo:pirate", "--max-tokens", "3", "--temperature", "0.5", "--stop", "END",
        "--logit-bias", '{"5": -1}', "--no-truncate-sequence", "--seed", "7", "--set", "top_k=4", "--json",
    )  # fmt: skip
    assert ran.code == Exit.DONE
    assert served.asked == {
        "model": "demo:pirate", "prompt": "Once", "max_tokens": 3, "temperature": 0.5, "stop": "END",
        "logit_bias": {"5": -1}, "truncate_sequence": False, "seed": 7, "top_k": 4,
    }  # fmt: skip
    assert ran.json["usage"]["completion_tokens"] == 3


def test_a_list_is_sent_as_a_list_and_a_text_that_looks_like_a_number_as_a_text(
    run: CommandLine, served: Served
) -> None:
    run("complete", "x", "--stop", '["a", "b"]', "--user", "5", "--max-tokens", "1", "--json")
    assert (served.asked["stop"], served.asked["user"]) == (["a", "b"], "5")


def test_streamed_and_whole_are_the_same_text(run: CommandLine) -> None:
    whole = run("complete", "Once", "--max-tokens", "5", "--no-stream").out
    assert run("complete", "Once", "--max-tokens", "5", "--stream").out == whole
    assert len(whole.split()) == 5


def test_a_pipe_is_a_prompt_and_its_last_line_break_none_of_it(
    run: CommandLine, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["complete"], ["complete", "-"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
        assert run(*words, "--max-tokens", "1").code == Exit.DONE
        assert served.asked["prompt"] == "two\nlines"


def test_several_choices_are_one_below_the_other_and_their_numbers_no_part_of_them(run: CommandLine) -> None:
    ran = run("complete", "Once", "--n", "2", "--max-tokens", "2", "--stream")
    assert len(ran.out.splitlines()) == 2
    assert [line[:3] for line in ran.err.splitlines()] == ["[0]", "[1]"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["complete", "x", "--temperature", "9"], Exit.REFUSED, '"temperature" must be a number from 0 to 2; found 9'),
        (["complete", "x", "-m", "nobody"], Exit.REFUSED, "`serve_app models` lists what is served"),
        (["complete", "x", "--top-k", "many"], Exit.MISUSED, "--top-k: 'many' is no integer"),
        (["complete", "x", "--set", "top_k"], Exit.MISUSED, "write --set name=value"),
        (["complete", "x", "--set", "model=demo"], Exit.MISUSED, "--set model=demo: the command says 'model' itself"),
        (["complete", "x", "--set", "stream=true"], Exit.MISUSED, "the command says 'stream' itself; see --help."),
        (["explain", "x", "--set", "prompt=y"], Exit.MISUSED, "the command says 'prompt' itself"),
        (["chat", "x", "--set", "messages=[]"], Exit.MISUSED, "the command says 'messages' itself"),
        (["bench", "--set", "prompt=y"], Exit.MISUSED, "the command says 'prompt' itself"),
        (["bench", "-m", "nobody"], Exit.REFUSED, "`serve_app models` lists what is served"),
        (["bench", "-m", "demo", "--beside", "demo"], Exit.MISUSED, "--beside has to name another model"),
        (["bench", "--beside", "nobody"], Exit.REFUSED, "`serve_app models` lists what is served"),
        (["bench", DEAD, "-m", "demo"], Exit.UNREACHABLE, "No service answers"),
        (["complete", "x", "--url", DEAD], Exit.UNREACHABLE, "Start one with `serve_app up`"),
        (["complete", "x", "--dialect", "latin"], Exit.REFUSED, "latin"),
        (["compare", "x", "--models", "demo"], Exit.FAILED, "two models or more"),
        (["models", "--url", "file:///etc/hosts"], Exit.MISUSED, "begins with http:// or https://"),
        (["models", "--url", DEAD], Exit.UNREACHABLE, "No service answers"),
        (["bench", DEAD], Exit.UNREACHABLE, "No service answers"),
        (["top", "--once", "--url", DEAD], Exit.UNREACHABLE, "No service answers"),
        (["explain", "x", "--temperature", "9"], Exit.REFUSED, '"temperature" must be'),
    ],
)
def test_what_went_wrong_is_one_line_with_the_next_step(
    run: CommandLine, words: list[str], code: Exit, told: str
) -> None:
    ran = run(*words)
    assert (ran.code, ran.out) == (code, "")
    assert told in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_stream_that_fails_in_the_middle_ends_with_its_error(run: CommandLine, served: Served) -> None:
    served.backend.refusal = RuntimeError("no")
    try:
        ran = run("complete", "x", "--stream", "--max-tokens", "4")
    finally:
        served.backend.refusal = None
    assert ran.code == Exit.SERVICE_FAILED
    assert "Traceback" not in ran.err


def test_models_are_a_name_a_line_in_a_pipe(run: CommandLine) -> None:
    assert run("models").out.split() == ["demo", "demo:pirate", "demo:shout"]
    assert [each["id"] for each in run("models", "--json").json] == ["demo", "demo:pirate", "demo:shout"]
    assert run("adapters", "list").out.split() == ["demo:pirate", "demo:shout"]


def test_a_comparison_asks_once_and_shows_each_models_text(run: CommandLine, served: Served) -> None:
    before = len(served.recorded.bodies)
    ran = run("compare", "Once", "--models", "demo,demo:pirate", "--max-tokens", "2")
    assert len(served.recorded.bodies) == before + 1
    assert served.asked["model"] == ["demo", "demo:pirate"]
    assert [line for line in ran.out.splitlines() if line.startswith("──")] == ["── demo", "── demo:pirate"]


def test_a_message_is_answered_at_once(run: CommandLine, served: Served) -> None:
    ran = run("chat", "Hello", "--system", "Be brief.", "--max-tokens", "2", "--json")
    assert ran.json["choices"][0]["message"]["role"] == "assistant"
    assert [each["role"] for each in served.asked["messages"]] == ["system", "user"]
    plain = run("chat", "Hello", "--max-tokens", "2", "--no-stream").out
    assert run("chat", "Hello", "--max-tokens", "2", "--stream").out == plain


def test_what_a_model_writes_gives_a_terminal_no_orders() -> None:
    assert screen.visible("a\x1b[31mb\tc\n\u202e\r") == "a\\x1b[31mb\tc\n\\u202e\\r"
    assert screen.visible("Grüße, 世界 🦜 ‿") == "Grüße, 世界 🦜 ‿"


def test_a_key_comes_from_the_environment_or_an_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def identify(key: str | None) -> Identity:
        if key != "sa-good":
            raise Unauthenticated("This service asks for a key.")
        return LOCAL

    with serving(Door(identify=identify)) as guarded:
        run = CommandLine(guarded.url, monkeypatch, capsys)
        refused = run("complete", "x")
        assert refused.code == Exit.REFUSED
        assert "SERVE_APP_KEY or --key; `serve_app keys create` makes one" in refused.err
        assert run("models", "--key", "sa-good").code == Exit.DONE
        for name in ("SERVE_APP_API_KEY", "SERVE_APP_KEY"):
            monkeypatch.setenv(name, "sa-good")
            assert run("complete", "x", "--max-tokens", "1").code == Exit.DONE
            monkeypatch.delenv(name)


def test_a_bench_reports_what_it_was_worth(run: CommandLine, served: Served) -> None:
    ran = run("bench", "-n", "6", "-c", "3", "--max-tokens", "4", "--json")
    assert ran.code == Exit.DONE
    told = ran.json
    assert (told["num_answered"], told["num_failed"], told["output_tokens"]) == (6, 0, 24)
    assert told["first_token_s"]["p50"] <= told["request_s"]["max"]
    assert len({body["prompt"] for body in served.recorded.bodies[-6:]}) == 6
    assert "to the first token" in run("bench", served.url, "-n", "2", "--max-tokens", "2").out


def test_a_bench_of_two_models_asks_both_the_same_and_says_how_they_compare(run: CommandLine, served: Served) -> None:
    words = ["bench", "--beside", "demo:pirate", "-n", "4", "-c", "2", "--max-tokens", "3"]
    told = run(*words, "--json").json["models"]
    assert [(each["model"], each["num_answered"], each["output_tokens"]) for each in told] == [
        ("demo", 4, 12), ("demo:pirate", 4, 12),
    ]  # fmt: skip
    prompts = {
        model: sorted(body["prompt"] for body in served.recorded.bodies[-8:] if body["model"] == model)
        for model in ("demo", "demo:pirate")
    }
    assert prompts["demo"] == prompts["demo:pirate"]
    assert "times the tokens per second of demo:pirate" in run(*words).out


def test_a_bench_whose_first_request_is_refused_ends_as_that_would(run: CommandLine) -> None:
    ran = run("bench", "-n", "2", "--set", "n=2", "--set", "best_of=1", "--max-tokens", "2")
    assert ran.code == Exit.REFUSED
    assert "best_of" in ran.err


def test_top_shows_replicas_and_totals(run: CommandLine) -> None:
    ran = run("top", "--once", "--interval", "0.2")
    assert "replica-0" in ran.out
    assert run("top", "--json", "--interval", "0.2").json["replicas"][0]["model"] == "demo"


def test_an_explanation_runs_nothing(run: CommandLine, served: Served) -> None:
    before = len(served.backend.submissions)
    ran = run("explain", "Once", "-m", "demo:pirate", "--temperature", "0.5", "--n", "2", "--dialect", "llama.cpp")
    assert ran.code == Exit.DONE
    assert len(served.backend.submissions) == before
    assert "llama.cpp" in ran.out
    assert "pirate × 1" in ran.out
    lines = {line.split()[0]: line.split()[-1] for line in ran.out.splitlines() if len(line.split()) > 2}
    assert (lines["temperature"], lines["top_k"]) == ("body", "dialect")


def test_folders_are_judged_without_a_service(run: CommandLine, tmp_path: Path) -> None:
    assert run("adapters", "check", "adapters/demo").code == Exit.DONE
    unknown = run("models", "check", "builtin:demo", "--dtype", "bogus")
    assert (unknown.code, "'bogus' is not one of 'auto', 'float32'" in unknown.err) == (Exit.MISUSED, True)
    assert get_args(Dtype) == get_args(get_type_hints(ModelArgs)["dtype"])
    empty = run("adapters", "check", str(tmp_path))
    assert (empty.code, "holds no adapter" in empty.err) == (Exit.FAILED, True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    broken = run("adapters", "check", str(tmp_path), "--json")
    assert broken.code == Exit.FAILED
    assert broken.json[0]["name"] == "mine"
    assert broken.json[0]["reason"]


def test_a_limit_of_an_explanation_stands_apart_from_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    limits = {name: {"remaining": 597, "limit": 600} for name in ("requests_per_minute", "max_in_flight_tokens", "x")}
    told = {
        "dialect": "union",
        "choices": 1,
        "parts": [],
        "ignored_parameters": [],
        "cost_at_most": 0,
        "parameters": {},
    }

    show_explanation({**told, "limits": limits})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" of 600 left")]
    assert [line.split("  ")[0] for line in lines] == ["requests per minute", "max in flight tokens", "x"]
    assert len({line.index("597") for line in lines}) == 1
