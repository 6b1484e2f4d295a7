"""The tree of commands: what all of them have, what a slip of the pen is told, and what importing it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app.api.chat import CHAT_PARAMETERS
from serve_app.api.parameters import PARAMETERS, Carried
from serve_app.cli import main
from serve_app.cli.main import DEBUG_VARIABLE
from serve_app.cli.parameters import OWN, PANELS
from serve_app.cli.screen import MEANINGS, Exit
from serve_app.cli.tree import command
from tests.cli.served import CommandLine

HEAVY = {"ray", "torch", "transformers", "peft", "pydantic", "starlette", "sqlalchemy", "prometheus_client", "yaml"}
SHOWN = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})), file=sys.stderr)"


def leaves(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, by the words that lead to it."""
    for name, each in group.commands.items():
        if not hasattr(each, "commands"):
            yield (*path, name), each
            continue
        if each.invoke_without_command:
            yield (*path, name), each
        yield from leaves(each, (*path, name))


LEAVES = list(leaves(command()))
every_command = pytest.mark.parametrize(
    ("path", "each"), LEAVES, ids=lambda each: " ".join(each) if each is tuple else ""
)


def options_of(each: Any) -> set[str]:
    return {word for option in each.params for word in option.opts}


@every_command
def test_every_command_answers_programs(path: tuple[str, ...], each: Any) -> None:
    assert "--json" in options_of(each)


@every_command
def test_every_command_and_option_says_what_it_is(path: tuple[str, ...], each: Any) -> None:
    assert each.help.endswith(".")
    assert [option.name for option in each.params if not getattr(option, "help", None)] == []


@every_command
def test_every_command_has_help(path: tuple[str, ...], each: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*path, "--help"]) == Exit.DONE
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["complet", "x"], "complete"),
        (["tenant", "list"], "tenants"),
        (["keys", "creat", "acme"], "create"),
        (["complete", "--tempratur", "1"], "--temperature"),
        (["bench", "--client", "3"], "--clients"),
        (["complete", "x", "--set", "temperture=1"], "temperature"),
    ],
)
def test_a_slip_of_the_pen_is_told_the_nearest_word(
    words: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == Exit.MISUSED
    said = capsys.readouterr()
    assert near in said.err
    assert said.out == ""


def test_without_a_word_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == Exit.MISUSED
    assert "complete" in "".join(capsys.readouterr())


def test_every_exit_code_is_explained() -> None:
    assert set(MEANINGS) == set(Exit)


@pytest.mark.parametrize(
    ("name", "table"), [("complete", PARAMETERS), ("chat", CHAT_PARAMETERS), ("compare", PARAMETERS)]
)
def test_every_parameter_of_the_contract_is_an_option(name: str, table: dict[str, Any]) -> None:
    each = command().commands[name]
    context = each.make_context(name, ["x"], resilient_parsing=True)
    offered = {word for option in each.get_params(context) for word in option.opts}
    carried = {parameter for parameter, what in table.items() if isinstance(what, Carried)}
    assert {f"--{parameter.replace('_', '-')}" for parameter in carried - OWN} <= offered
    assert len(carried) > 60


def test_parameters_stand_in_the_help_by_their_subjects(capsys: pytest.CaptureFixture[str]) -> None:
    main(["chat", "--help-all"])
    told = capsys.readouterr().out
    assert [panel for panel in PANELS.values() if f" {panel} " not in told] == []


def test_a_fault_is_one_line_and_a_traceback_only_on_request(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_URL", "http://[not-an-address")
    ran = run("models")
    assert ran.code == Exit.MISUSED
    assert len(ran.err.splitlines()) == 1
    assert "Traceback" not in ran.err
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    with pytest.raises(Exception, match=r"not-an-address|IPv6|No service"):
        run("models")


@pytest.mark.parametrize(
    ("code", "none_of"),
    [
        ("from serve_app.cli import main; main(['--help'])", HEAVY),
        ("from serve_app.cli import main; main(['env'])", HEAVY - {"pydantic"}),  # typer reads options with it
        (
            "from serve_app.cli import main; main(['complete', 'hi', '--url', 'http://127.0.0.1:1'])",
            {"ray", "torch", "transformers", "peft", "starlette", "sqlalchemy"},
        ),
        ("import serve_app.cli.processes, serve_app.cli.processes", {*HEAVY, "typer", "rich"}),
        (
            "import serve_app.router.router, serve_app.http.app",
            {"ray", "torch", "transformers", "peft", "typer", "rich"},
        ),
    ],
    ids=["help", "env", "complete", "guard", "router"],
)
def test_what_is_not_needed_is_not_imported(code: str, none_of: set[str]) -> None:
    ran = subprocess.run([sys.executable, "-c", f"{code}\n{SHOWN}"], capture_output=True, text=True, check=True)
    assert none_of & set(json.loads(ran.stderr.splitlines()[-1])) == set()


def test_completions_of_a_shell_know_the_commands() -> None:
    asked = (
        "import os; os.environ.update(_SERVE_APP_COMPLETE='complete_bash', COMP_WORDS='serve_app com', COMP_CWORD='1')"
    )
    code = f"{asked}\nfrom serve_app.cli import main\nraise SystemExit(main([]))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert {"complete", "compare"} <= set(ran.stdout.split())


@pytest.mark.parametrize(
    ("word", "ours"),
    [("serve", "up"), ("run", "up"), ("list", "models"), ("version", "--version"), ("stop", "down"), ("ps", "top")],
)
def test_a_command_of_other_programs_is_told_ours(word: str, ours: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == Exit.MISUSED
    assert f"No such command '{word}'. Did you mean '{ours}'?" in capsys.readouterr().err
